"""The oldest versions that kmem supports, where they differ from the newest."""

import keras
import tensorflow as tf

IS_KERAS_3_12 = keras.__version__.startswith("3.12.")
IS_TENSORFLOW_2_20 = tf.__version__.startswith("2.20.")
