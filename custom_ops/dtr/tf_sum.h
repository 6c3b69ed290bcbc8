// Sums of many addends, a few at a time.
//
// A gradient tape hands AddN one gradient for every time that a variable was
// read: hundreds in a recursive model, all in memory at once. TensorFlow's
// kernel adds up the first two to nine, so many that a multiple of eight is
// left, and then adds the sum of each following eight. Operators of their own
// do the same, to the bit, and have ten tensors in memory at a time: eight
// addends, their sum and the sum so far.

#ifndef KMEM_DTR_TF_SUM_H_
#define KMEM_DTR_TF_SUM_H_

#include "tensorflow/c/eager/c_api.h"
#include "tf_session.h"

namespace kmem::dtr {

// Whether an operator is a sum of tensors that together take much of the
// memory that there would be if all that can be evicted were.
bool IsLargeSum(const TFE_Op* op, const Session& session);

// Runs a large sum in parts. As Session::Execute, with one output.
void ExecuteSum(Session* session, const TFE_Op* op, TFE_TensorHandle** output,
                TF_Status* status);

}  // namespace kmem::dtr

#endif  // KMEM_DTR_TF_SUM_H_
