# SPDX-License-Identifier: Apache-2.0
"""The models of the papers.

All models map a batch [n, *in_shape] to logits [n, num_classes], to be trained with cross entropy.
None has batch normalisation; only vgg11 has dropout layers.

To add a model, write a function `(in_shape, num_classes) -> nn.Module` and add it to MODELS. If
it has running statistics, the rule does not aggregate them: the server's are the mean of those of
the active clients.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn

from fastagg_sim.pooling import MaxPool2x2
from fastagg_sim.registry import lookup
from fastagg_sim.seeds import derive

Shape = tuple[int, ...]


def _pooled_features(name: str, in_shape: Shape, channels: int) -> int:
    """Return the number of features after two blocks of 5x5 convolution (no padding) and 2x2
    pooling, where the second convolution has `channels` output channels.

    Raises ValueError, naming the model `name`, if `in_shape` is too small.
    """
    if len(in_shape) == 3:
        height, width = (((side - 4) // 2 - 4) // 2 for side in in_shape[1:])
        if height >= 1 and width >= 1:
            return channels * height * width
    raise ValueError(
        f"in_shape: {name} expects images (channels, height, width) of at least 16x16, "
        f"got {in_shape}"
    )


def mnist_cnn(in_shape: Shape, num_classes: int) -> nn.Module:
    """The MNIST model of FL-FDMS: conv 5x5 to 10, pool, conv 5x5 to 20, pool, 50.

    d = 21,840 on 28x28 grey images. The code from which this model is derived also has dropout
    layers. The paper does not mention them, and with them the published curves cannot be
    reproduced.
    """
    features = _pooled_features("mnist-cnn", in_shape, 20)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_shape[0], 10, 5),
            pool1=MaxPool2x2(),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(10, 20, 5),
            pool2=MaxPool2x2(),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(features, 50),
            relu3=nn.ReLU(),
            fc2=nn.Linear(50, num_classes),
        )
    )


def lenet(in_shape: Shape, num_classes: int) -> nn.Module:
    """LeNet-5 as in FL-FDMS and Su et al.: conv 5x5 to 6, pool, conv 5x5 to 16, pool, 120, 84.

    d = 62,006 on CIFAR-10. On 28x28 grey images it is the model of MimiC for Fashion-MNIST
    ("niid-cnn", d = 44,426).
    """
    features = _pooled_features("lenet", in_shape, 16)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_shape[0], 6, 5),
            relu1=nn.ReLU(),
            pool1=MaxPool2x2(),
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(),
            pool2=MaxPool2x2(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(features, 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            fc3=nn.Linear(84, num_classes),
        )
    )


_VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def vgg11(in_shape: Shape, num_classes: int) -> nn.Module:
    """VGG-11 without batch normalisation for small images, MimiC's model for CIFAR-10.

    Eight 3x3 convolutions with padding and five 2x2 poolings reduce a 32x32 image to 512 features.
    The classifier is dropout 0.5, 512, ReLU, dropout 0.5, 512, ReLU. d = 9,750,922 on CIFAR-10.

    Weights are initialised from N(0, 2 / inputs) (He et al.), biases with zero. With MimiC's
    learning rate of 0.01, batches of 32 and all of CIFAR-10, the training loss is then 2.00 after
    500 steps. With PyTorch's default initialisation it is still ln 10 = 2.30, because the features
    hardly depend on the image. The same holds for N(0, 2 / outputs) in the convolutions alone,
    which is common in code for this model.
    """
    if len(in_shape) != 3 or min(in_shape[1:]) < 32:
        raise ValueError(
            f"in_shape: vgg11 expects images (channels, height, width) of at least 32x32, "
            f"got {in_shape}"
        )
    channels, height, width = in_shape
    features: list[nn.Module] = []
    for size in _VGG11:
        if isinstance(size, int):
            features += [nn.Conv2d(channels, size, 3, padding=1), nn.ReLU()]
            channels = size
        else:
            features.append(MaxPool2x2())
    model = nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*features),
            flatten=nn.Flatten(),
            dropout1=nn.Dropout(0.5),
            fc1=nn.Linear(512 * (height // 32) * (width // 32), 512),
            relu1=nn.ReLU(),
            dropout2=nn.Dropout(0.5),
            fc2=nn.Linear(512, 512),
            relu2=nn.ReLU(),
            fc3=nn.Linear(512, num_classes),
        )
    )
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
        else:
            nn.init.zeros_(parameter)
    return model


def logistic(in_shape: Shape, num_classes: int) -> nn.Module:
    """Multinomial logistic regression; d = 610 on Synthetic(1,1) (60 features, 10 classes)."""
    return nn.Sequential(
        OrderedDict(flatten=nn.Flatten(), fc=nn.Linear(math.prod(in_shape), num_classes))
    )


def digits_mlp(in_shape: Shape, num_classes: int) -> nn.Module:
    """One hidden layer of 64; d = 4,810 on the 8x8 digits."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(math.prod(in_shape), 64),
            relu=nn.ReLU(),
            fc2=nn.Linear(64, num_classes),
        )
    )


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "mnist-cnn": mnist_cnn,
    "lenet": lenet,
    "niid-cnn": lenet,
    "vgg11": vgg11,
    "logistic": logistic,
    "digits-mlp": digits_mlp,
}


def make_model(name: str, *, num_classes: int, in_shape: Shape, seed: int) -> nn.Module:
    """Create the model `name` on the CPU.

    in_shape: the shape of one sample, without the batch dimension.
    seed: the seed of the run. The initial parameters (PyTorch's default initialisation, except for
        vgg11) depend on it alone. The global random state does not change.

    Raises ValueError for an unknown name, or if the model does not support inputs of this shape.
    """
    make = lookup("model", name, MODELS)
    if num_classes < 1:
        raise ValueError(f"num_classes: expected a positive number, got {num_classes}")
    if not in_shape or min(in_shape) < 1:
        raise ValueError(f"in_shape: expected positive sizes, got {tuple(in_shape)}")
    # Not torch.manual_seed, which also reseeds the GPUs: fork_rng(devices=[]) would not restore
    # their state.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive(seed, "model"))
        return make(tuple(in_shape), num_classes)
