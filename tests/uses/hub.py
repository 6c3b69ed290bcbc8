"""Models of KerasHub from a small config, with random weights.

Their `fit` is KerasHub's own: it takes raw texts and images where there is a
preprocessor.
"""

import keras
import keras_hub
import numpy as np

from uses.arrays import NUM_ROWS
from uses.arrays import integers
from uses.arrays import normal
from uses.harness import in_32_bits

_VOCABULARY = 17
_LENGTH = 6


def _trained(trainer, model, x, y):
    model.compile(
        keras.optimizers.SGD(0.05),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    trainer.fit(model, x, y)
    return model


def _tokens():
    ids = integers(_VOCABULARY, _LENGTH, low=1)
    lengths = integers(_LENGTH + 1, low=2, seed=10)
    mask = np.arange(_LENGTH)[None] < lengths[:, None]
    return {"token_ids": ids * mask, "padding_mask": mask.astype("int32")}


def _next_tokens():
    return integers(_VOCABULARY, _LENGTH, seed=12)


@in_32_bits
def gpt2(trainer):
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=_VOCABULARY,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=_LENGTH,
        dropout=0.0,
    )
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    return _trained(trainer, model, _tokens(), _next_tokens())


@in_32_bits
def bert(trainer):
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=_VOCABULARY,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=_LENGTH,
        dropout=0.0,
    )
    model = keras_hub.models.BertTextClassifier(
        backbone, num_classes=3, preprocessor=None, dropout=0.0
    )
    x = _tokens() | {"segment_ids": np.zeros((NUM_ROWS, _LENGTH), "int32")}
    return _trained(trainer, model, x, integers(3))


@in_32_bits
def llama(trainer):
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=_VOCABULARY,
        num_layers=2,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=8,
        intermediate_dim=16,
    )
    model = keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)
    return _trained(trainer, model, _tokens(), _next_tokens())


@in_32_bits
def vit(trainer):
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(8, 8, 3),
        patch_size=4,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=16,
    )
    model = keras_hub.models.ViTImageClassifier(
        backbone, num_classes=3, preprocessor=None
    )
    return _trained(trainer, model, normal(8, 8, 3), integers(3))


@in_32_bits
def resnet(trainer):
    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        use_pre_activation=False,
        image_shape=(16, 16, 3),
    )
    model = keras_hub.models.ResNetImageClassifier(
        backbone, num_classes=3, preprocessor=None
    )
    return _trained(trainer, model, normal(16, 16, 3), integers(3))


USES = {f.__name__: f for f in (gpt2, bert, llama, vit, resnet)}
