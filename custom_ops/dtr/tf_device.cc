// The custom device that TensorFlow hands every operator to before it runs,
// and what Python calls through ctypes to put it in place.
//
// One for the process, for ever: TensorFlow cannot take a device away again.
// While no session is on it, it lets every operator run where it would
// without it, also those that read what a session has left behind.

#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "../memory/evictor.h"
#include "../memory/export.h"
#include "tensorflow/c/eager/tfe_tensorhandle_internal.h"
#include "tensorflow/core/common_runtime/eager/custom_device.h"
#include "tf_session.h"
#include "tf_sum.h"

namespace kmem::dtr {

const char* const kCustomDeviceName =
    "/job:localhost/replica:0/task:0/device:KMEM_DTR:0";

TrackedHandle* TrackedHandleOf(TFE_TensorHandle* handle) {
  auto* inner = tensorflow::unwrap(handle);
  if (!tensorflow::CustomDeviceTensorHandle::classof(inner)) return nullptr;
  auto* custom = static_cast<tensorflow::CustomDeviceTensorHandle*>(inner);
  if (custom->device()->name() != kCustomDeviceName) return nullptr;
  return static_cast<TrackedHandle*>(custom->DevicePointer());
}

namespace {

class Device : public Evictor {
 public:
  bool MakeRoom(int64_t bytes) override {
    const std::shared_ptr<Session> session = current();
    if (session == nullptr) return false;
    return session->MakeRoom(bytes) || (grows_ && physical_->Raise(bytes));
  }

  bool MakeBlock(int64_t bytes) override {
    const std::shared_ptr<Session> session = current();
    return session != nullptr && session->MakeBlock(bytes);
  }

  std::shared_ptr<Session> current() { return std::atomic_load(&current_); }

  bool Begin(std::shared_ptr<Session> session, int64_t limit_bytes,
             bool grows) {
    physical_ = session->device();
    if (!physical_->Begin(limit_bytes, this)) return false;
    grows_ = grows;
    session->BeginStep();
    std::atomic_store(&current_, std::move(session));
    return true;
  }

  int64_t End(bool failed) {
    const std::shared_ptr<Session> session = current();
    std::atomic_store(&current_, std::shared_ptr<Session>());
    session->EndStep(failed);
    const int64_t limit_bytes = physical_->LimitBytes();
    physical_->End();
    return limit_bytes;
  }

 private:
  std::shared_ptr<Session> current_;
  PhysicalDevice* physical_ = nullptr;
  bool grows_ = false;
};

Device* TheDevice() {
  static Device* device = new Device;
  return device;
}

// What comes from outside stays where it is.
TFE_TensorHandle* CopyToDevice(TFE_Context*, TFE_TensorHandle* tensor,
                               TF_Status* status, void*) {
  return TFE_TensorHandleCopySharingTensor(tensor, status);
}

TFE_TensorHandle* CopyFromDevice(TFE_Context* context,
                                 TFE_TensorHandle* tensor, const char* target,
                                 TF_Status* status, void*) {
  const TrackedHandle* handle = TrackedHandleOf(tensor);
  HandlePtr value = handle->session->Fetch(handle->tensor, status);
  if (value == nullptr || target == handle->session->device()->name()) {
    return value.release();
  }
  return TFE_TensorHandleCopyToDevice(value.get(), context, target, status);
}

void Execute(const TFE_Op* op, int* num_outputs, TFE_TensorHandle** outputs,
             TF_Status* status, void*) {
  const std::shared_ptr<Session> session = TheDevice()->current();
  if (session == nullptr) {
    TF_SetStatus(status, TF_FAILED_PRECONDITION,
                 "DTR must be enabled to run operators on its device: use "
                 "`kmem.dtr.scope()`.");
    return;
  }
  if (IsLargeSum(op, *session)) {
    ExecuteSum(session.get(), op, outputs, status);
    return;
  }
  session->Execute(op, num_outputs, outputs, status);
}

bool ShallPin(const TFE_Op*, TF_Status*) {
  return TheDevice()->current() != nullptr;
}

}  // namespace
}  // namespace kmem::dtr

// What Python calls, as declared in kmem/base/bindings.py.
extern "C" {

using SessionPtr = std::shared_ptr<kmem::dtr::Session>;

// `context` is a TFE_Context.
KMEM_EXPORT bool kmem_dtr_register(void* context, char* message,
                                   int64_t message_bytes) {
  TFE_CustomDevice device;
  device.copy_tensor_to_device = kmem::dtr::CopyToDevice;
  device.copy_tensor_from_device = kmem::dtr::CopyFromDevice;
  device.execute = kmem::dtr::Execute;
  device.delete_device = [](void*) {};
  device.shall_pin_to_this_device = kmem::dtr::ShallPin;
  kmem::dtr::StatusPtr status = kmem::dtr::NewStatus();
  TFE_RegisterCustomDevice(static_cast<TFE_Context*>(context), device,
                           kmem::dtr::kCustomDeviceName, nullptr,
                           status.get());
  std::snprintf(message, message_bytes, "%s", TF_Message(status.get()));
  return kmem::dtr::IsOk(status);
}

// Operators run on GPU:0 if there is one. Options are the fields of their
// struct.
KMEM_EXPORT void* kmem_dtr_new_session(void* context, const char* heuristic,
                                       const kmem::dtr::Options* options) {
  kmem::dtr::PhysicalDevice* device =
      kmem::dtr::ThePhysicalDevice(static_cast<TFE_Context*>(context));
  return new SessionPtr(
      std::make_shared<kmem::dtr::Session>(device, heuristic, *options));
}

KMEM_EXPORT void kmem_dtr_delete_session(void* session) {
  delete static_cast<SessionPtr*>(session);
}

// Puts a session on the device, and a limit on its memory if it is lower than
// the one there is. Returns false, and changes nothing, if more is in use. With
// `grows`, the limit is raised where nothing is left to evict.
KMEM_EXPORT bool kmem_dtr_begin(void* session, int64_t limit_bytes,
                                bool grows) {
  return kmem::dtr::TheDevice()->Begin(*static_cast<SessionPtr*>(session),
                                       limit_bytes, grows);
}

// Returns the limit as it was at last. `failed`: for lack of memory.
KMEM_EXPORT int64_t kmem_dtr_end(bool failed) {
  return kmem::dtr::TheDevice()->End(failed);
}

KMEM_EXPORT void kmem_dtr_heuristic(void* session, char* name,
                                    int64_t name_bytes) {
  std::snprintf(name, name_bytes, "%s",
                (*static_cast<SessionPtr*>(session))->heuristic().c_str());
}

KMEM_EXPORT bool kmem_dtr_begin_trace(void* session, const char* path) {
  return (*static_cast<SessionPtr*>(session))->BeginTrace(path);
}

KMEM_EXPORT void kmem_dtr_end_trace(void* session) {
  (*static_cast<SessionPtr*>(session))->EndTrace();
}

KMEM_EXPORT int64_t kmem_dtr_options_bytes() {
  return sizeof(kmem::dtr::Options);
}

KMEM_EXPORT int64_t kmem_dtr_statistics_bytes() {
  return sizeof(kmem::dtr::Statistics);
}

KMEM_EXPORT void kmem_dtr_statistics(void* session,
                                     kmem::dtr::Statistics* statistics) {
  *statistics = (*static_cast<SessionPtr*>(session))->statistics();
}

}  // extern "C"
