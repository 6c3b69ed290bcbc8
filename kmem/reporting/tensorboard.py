"""Pictures for TensorBoard, written without the package of that name."""

import os
import struct

import tensorflow as tf

_HEADER_BYTES = 24


def write_images(
    pictures: dict[str, bytes], log_dir: str | os.PathLike
) -> None:
    """Writes PNGs as images of step 0.

    Args:
        pictures: The PNGs, by name.
        log_dir: TensorBoard's folder.
    """
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.plugin_data.plugin_name = "images"
    writer = tf.summary.create_file_writer(str(log_dir))
    with writer.as_default(step=0):
        for name, png in pictures.items():
            width, height = struct.unpack(">2I", png[16:_HEADER_BYTES])
            image = [str(width).encode(), str(height).encode(), png]
            tf.summary.write(f"memory/{name}", image, metadata=metadata)
    writer.close()
