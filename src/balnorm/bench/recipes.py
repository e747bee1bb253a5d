"""The experiments: one function for each of the paper's, and some that two cores can run. Comments give sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from balnorm.bench.training.config import Recipe

__all__ = ["RECIPES", "get_recipe"]


def cifar10_wrn() -> Recipe:
    """CIFAR-10 with the paper's wide ResNet, 300 epochs (section 6.1)."""
    return Recipe(
        name="cifar10-wrn",
        data="cifar10",
        model="wide_resnet",  # 20 convolutions, 96 initial planes, 9.7 million parameters
        depth=20,
        width=96,
        epochs=300,
        batch_size=128,
        lr=0.1,
        momentum=0.9,
        weight_decay=1e-4,
        schedule="multistep",
        drops=(150, 225),  # "10 fold learning reductions at epochs 150 and 225"
        padding=4,  # "pad 4px and crop to 32px", and flips
    )


def cifar10_wrn_quarter() -> Recipe:
    """cifar10-wrn with statistics from a quarter of the batch: the paper's first remedy against overfitting."""
    return replace(cifar10_wrn(), name="cifar10-wrn-quarter", stats_fraction=0.25)


def cifar10_wrn_mixup() -> Recipe:
    """cifar10-wrn with manifold mixup, alpha 6: the paper's second remedy, and its recommendation."""
    return replace(cifar10_wrn(), name="cifar10-wrn-mixup", mixup="manifold", alpha=6.0)


def cifar10_preact152() -> Recipe:
    """CIFAR-10 with pre-activation ResNet-152 and manifold mixup, alpha 6 (the paper's figure 4a)."""
    return replace(
        cifar10_wrn(),
        name="cifar10-preact152",
        model="preact_resnet152",
        depth=None,
        width=64,
        mixup="manifold",
        alpha=6.0,
    )


def cifar100_preact152() -> Recipe:
    """CIFAR-100, "the same hyper-parameters and network architecture as for CIFAR10" (figure 4b)."""
    return replace(cifar10_preact152(), name="cifar100-preact152", data="cifar100")


def cifar10_short() -> Recipe:
    """30 epochs with one cycle of learning rate and momentum, and manifold mixup (section 6.2)."""
    return replace(cifar10_wrn_mixup(), name="cifar10-short", epochs=30, schedule="onecycle", drops=())


def svhn_wrn() -> Recipe:
    """SVHN with its extra images (section 6.3). The paper used two GPUs: start two processes."""
    return replace(
        cifar10_wrn_mixup(),  # "WRN with manifold mixup alpha = 6"
        name="svhn-wrn",
        data="svhn-extra",
        epochs=160,  # the paper gives the drops but not the end; 160 keeps the proportions
        drops=(80, 120),
    )


def imagenet_resnet50() -> Recipe:
    """ImageNet with ResNet-50 for the usual 90 epochs (section 6.4), 256 images per batch in all."""
    return Recipe(
        name="imagenet-resnet50",
        data="folder",
        model="resnet50",
        epochs=90,
        batch_size=256,  # in each process: with several, divide it by their number
        lr=0.1,
        weight_decay=1e-4,
        schedule="multistep",
        drops=(30, 60),
        image_size=224,
        workers=8,
    )


def digits() -> Recipe:
    """scikit-learn's 8x8 digits with a small wide ResNet: seconds per epoch on a laptop, nothing to download."""
    return Recipe(
        name="digits",
        data="digits",
        model="wide_resnet",
        depth=8,
        width=16,
        epochs=15,
        batch_size=64,
        lr=0.1,
        schedule="cosine",
        padding=1,
    )


def cifar10_desk() -> Recipe:
    """A tenth of CIFAR-10 with a small wide ResNet: a few minutes on two cores."""
    return replace(
        cifar10_wrn(),
        name="cifar10-desk",
        depth=14,
        width=16,
        epochs=20,
        schedule="cosine",
        drops=(),
        train_limit=5_000,
        test_limit=2_000,
    )


def resnet_cifar10() -> Recipe:
    """All of CIFAR-10 with the ResNet-20 of He et al. 2015, norms before the addition: half an hour on a core."""
    return Recipe(
        name="resnet-cifar10",
        data="cifar10",
        model="cifar_resnet",
        depth=20,
        width=16,
        epochs=10,
        batch_size=128,
        lr=0.1,
        weight_decay=1e-4,
        schedule="cosine",
        padding=4,
    )


def resnet_cifar100() -> Recipe:
    """All of CIFAR-100 with a ResNet-20 of twice the width: two hours on a core."""
    return replace(resnet_cifar10(), name="resnet-cifar100", data="cifar100", width=32, epochs=15)


def folder() -> Recipe:
    """Your own images, in one folder per class under train/ and val/, at 64x64 with ResNet-18."""
    return Recipe(
        name="folder",
        data="folder",
        model="resnet18",
        epochs=30,
        batch_size=64,
        lr=0.05,
        schedule="cosine",
        image_size=64,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    build().name: build
    for build in (
        digits,
        cifar10_desk,
        resnet_cifar10,
        resnet_cifar100,
        folder,
        cifar10_wrn,
        cifar10_wrn_quarter,
        cifar10_wrn_mixup,
        cifar10_short,
        cifar10_preact152,
        cifar100_preact152,
        svhn_wrn,
        imagenet_resnet50,
    )
}
"""Every recipe, by name."""


def get_recipe(name: str) -> Recipe:
    """A recipe by name."""
    if name not in RECIPES:
        raise ValueError(f"the recipe must be one of {', '.join(RECIPES)}, got {name!r}")
    return RECIPES[name]()
