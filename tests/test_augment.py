"""Views depend on seed, epoch, view and sample, and have the distributions of torchvision."""

from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as tvf
from scipy.stats import chisquare
from sklearn.datasets import load_sample_images
from torch import Tensor
from torchvision import transforms

import raycl.augment.images
from raycl.augment import ImageAugmentation, center_view, two_views, uniforms
from raycl.augment.color import blur, blur_by_products, blur_by_shifts, color_transform, kernel_size, recolor
from raycl.augment.crop import NUM_BOX_DRAWS, draw_boxes, resample_by_products, resample_by_slices, rotate
from raycl.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PLAIN: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
STILL: dict[str, Any] = {
    "crop_scale": (1.0, 1.0),
    "crop_ratio": (1.0, 1.0),
    **dict.fromkeys(("flip", "jitter", "grayscale", "blur"), 0.0),
}
WHEN = {"seed": 0, "epoch": 0, "view": 0}


@pytest.fixture(scope="module")
def photos() -> np.ndarray:
    """Return 24 crops of 200 x 200 pixels from two photographs; uint8 [24, 200, 200, 3]."""
    tiles = [
        picture[top : top + 200, left : left + 200]
        for picture in load_sample_images().images
        for top in (0, 100, 200, 227)
        for left in (0, 200, 400)
    ]
    return np.stack(tiles).astype(np.uint8)


def squares(photos: np.ndarray, size: int) -> np.ndarray:
    """Cut the middle ``size`` x ``size`` pixels out of each photo."""
    start = (photos.shape[1] - size) // 2
    return np.ascontiguousarray(photos[:, start : start + size, start : start + size])


def as_planes(images: np.ndarray) -> Tensor:
    """Turn uint8 [n, height, width, channels] into [n, channels, height, width]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def noise(num_images: int, size: int, *, channels: int = 3) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (num_images, size, size, channels), dtype=np.uint8)


def views_of(images: np.ndarray, **settings: Any) -> Tensor:
    """Return views with only the given transforms, with pixels in [0, 1]."""
    channels = images.shape[3]
    plain = {
        "size": images.shape[1],
        "channels": channels,
        "mean": (0.0,) * channels,
        "std": (1.0,) * channels,
    }
    return ImageAugmentation(**(STILL | plain | settings))(images, np.arange(len(images)), **WHEN)


def largest_gap(one: np.ndarray, other: np.ndarray, *, slack: float) -> float:
    """Compare distribution functions, up to a shift of the values by ``slack``.

    The pixel grids differ, and the central fallback box is a single value.
    """
    one, other = np.sort(one), np.sort(other)

    def share_below(values: np.ndarray, limits: np.ndarray) -> np.ndarray:
        return np.searchsorted(values, limits, side="right") / len(values)

    gaps = [
        (share_below(low, low) - share_below(high, low + slack)).max()
        for low, high in ((one, other), (other, one))
    ]
    return float(max(gaps))


def assert_uniform(values: Tensor, low: float, high: float, *, slack: float = 1e-3) -> None:
    # 1.95 gives the 0.1% point of the statistic of Kolmogorov and Smirnov.
    assert largest_gap(values.numpy(), np.linspace(low, high, 10_000), slack=slack) < 1.95 / np.sqrt(
        len(values)
    )


# Draws


def mixed(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def test_a_gpu_draws_views_of_a_bounded_number_of_pixels() -> None:
    images = torch.empty(1_000, 512, 512, 3, dtype=torch.uint8, device="meta")
    pieces = list(raycl.augment.images._chunks(images, size=224))
    assert [each.stop - each.start for each in pieces] == [128] * 8
    assert len(list(raycl.augment.images._chunks(images[:, :32, :32], size=32))) == 1


@pytest.mark.parametrize(("seed", "epoch", "view"), [(0, 0, 0), (-3, 7, 1), (2**64 + 5, 1, 0)])
def test_uniform_draws_equal_a_hash_in_unbounded_integers(seed: int, epoch: int, view: int) -> None:
    ids = [0, 1, -1, 12345, -(2**63), 2**63 - 1]
    came = uniforms(np.array(ids), seed=seed, epoch=epoch, view=view, num=5)
    assert came.dtype == torch.float32
    for row, sample_id in enumerate(ids):
        for column in range(5):
            word = seed % 2**64
            for part in (view, epoch, sample_id, column):
                word = mixed(mixed((word + 0x9E3779B97F4A7C15) % 2**64) ^ (part % 2**64))
            assert came[row, column].item() == (word >> 40) / 2**24


def test_uniform_draws_accept_one_epoch_per_row() -> None:
    ids, epochs = np.array([4, 4, 9]), np.array([0, 1, 1])
    rows = uniforms(ids, seed=0, epoch=epochs, view=0, num=6)
    for row in range(3):
        alone = uniforms(ids[row : row + 1], seed=0, epoch=int(epochs[row]), view=0, num=6)
        assert torch.equal(rows[row], alone[0])


def test_neighboring_seeds_epochs_views_samples_and_columns_are_uniform_and_uncorrelated() -> None:
    ids = np.arange(20_000)

    def draw(*, shift: int = 0, seed: int = 0, epoch: int = 0, view: int = 0) -> Tensor:
        return uniforms(ids + shift, seed=seed, epoch=epoch, view=view, num=4)

    base = draw()
    for column in base.unbind(1):
        assert chisquare(torch.histc(column, bins=64, min=0, max=1).numpy()).pvalue > 1e-5
    others = [draw(shift=shift) for shift in (1, 2, 64, 2**32, -(2**63))]
    others += [draw(seed=1), draw(seed=2**32), draw(seed=-1), draw(epoch=1), draw(epoch=2)]
    others += [draw(view=1), draw(seed=1, epoch=1), draw(epoch=1, view=1), draw(epoch=1, shift=1)]
    for other in others:
        table = torch.corrcoef(torch.cat([base, other], dim=1).T) - torch.eye(8)
        assert table.abs().max() < 5 / np.sqrt(len(ids))  # five standard errors
        assert (base == other).float().mean() < 1e-3
    swapped = [draw(shift=1)[0], draw(seed=1)[0], draw(epoch=1)[0], draw(view=1)[0]]
    assert len({tuple(each.tolist()) for each in swapped}) == 4


# Inputs of a view


@pytest.mark.parametrize(("size", "stored"), [(32, 32), (96, 120)])
def test_a_view_is_independent_of_batch_order_and_chunk(
    size: int, stored: int, photos: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = np.tile(squares(photos, stored), (4, 1, 1, 1))
    ids = np.arange(len(images)) * 7 - 100
    augmentation = ImageAugmentation(size=size, mean=MEAN, std=STD)

    def views(rows: np.ndarray) -> Tensor:
        return augmentation(images[rows], ids[rows], seed=1, epoch=2, view=0)

    everything = np.arange(len(images))
    whole = views(everything)
    for rows in (np.random.default_rng(0).permutation(len(images)), everything[70:75], everything[3:4]):
        torch.testing.assert_close(views(rows), whole[rows], rtol=0, atol=1e-5)
    monkeypatch.setattr(raycl.augment.images, "_chunks", lambda *_, **__: [slice(0, None)])
    torch.testing.assert_close(views(everything), whole, rtol=0, atol=1e-5)


def test_a_view_depends_on_seed_epoch_view_and_sample(photos: np.ndarray) -> None:
    images, ids = squares(photos, 32), np.arange(len(photos))
    augmentation = ImageAugmentation(size=32, mean=MEAN, std=STD)
    base = augmentation(images, ids, **WHEN)
    for shift, other in ((0, {"seed": 1}), (0, {"epoch": 1}), (0, {"view": 1}), (len(ids), {})):
        view = augmentation(images, ids + shift, **(WHEN | other))
        assert ((view - base).abs().mean((1, 2, 3)) > 0.05).all()
    tensors = torch.from_numpy(images), torch.from_numpy(ids)
    both = two_views(*tensors, augmentation=augmentation, seed=0, epoch=0)
    assert torch.equal(both[0], base)
    assert torch.equal(both[1], augmentation(images, ids, seed=0, epoch=0, view=1))


# Crop


BOXES: dict[str, Any] = {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3)}


def relative(boxes: np.ndarray, *, height: int, width: int, aspect: float) -> dict[str, np.ndarray]:
    """Describe boxes independently of the pixel grid."""
    top, left, box_height, box_width = boxes.T.astype(np.float64)
    tall, wide = box_height / height, box_width / width
    return {
        "area": tall * wide,
        "log_ratio": np.log(wide / tall * aspect),
        "middle_x": left / width + wide / 2,
        "middle_y": top / height + tall / 2,
        "left": left / width,
        "top": top / height,
    }


def torchvisions_boxes(num: int, height: int, width: int, scale: tuple[float, float]) -> np.ndarray:
    torch.manual_seed(0)
    image, ratio = torch.empty(1, height, width), list(BOXES["ratio"])
    return np.array([transforms.RandomResizedCrop.get_params(image, list(scale), ratio) for _ in range(num)])


@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.5, 1.0)])
@pytest.mark.parametrize(("height", "width"), [(400, 400), (400, 800), (900, 300)])
def test_crop_boxes_are_distributed_like_torchvisions(
    height: int, width: int, scale: tuple[float, float]
) -> None:
    num = 2_500
    draws = uniforms(np.arange(4 * num), **WHEN, num=NUM_BOX_DRAWS)
    # raycl crops from an image resized to a square.
    aspect = torch.full((4 * num,), width / height)
    boxes = draw_boxes(draws, height=400, width=400, aspect=aspect, scale=scale, ratio=BOXES["ratio"])
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] >= 1).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= 400).all()
    theirs = torchvisions_boxes(num, height, width, scale)
    want = relative(theirs, height=height, width=width, aspect=width / height)
    came = relative(boxes.numpy(), height=400, width=400, aspect=width / height)
    for name, values in want.items():
        limit = 1.95 * np.sqrt(1 / num + 1 / (4 * num))
        assert largest_gap(values, came[name], slack=0.01) < limit, name


def test_boxes_on_a_coarse_grid_are_as_frequent_as_in_torchvision() -> None:
    num = 4_000
    draws = uniforms(np.arange(num), **WHEN, num=NUM_BOX_DRAWS)
    ours = draw_boxes(draws, height=8, width=8, aspect=torch.ones(num), **BOXES).numpy()
    theirs = torchvisions_boxes(num, 8, 8, BOXES["scale"])
    for column in range(4):
        want, came = (np.bincount(each[:, column], minlength=9) / num for each in (theirs, ours))
        assert np.abs(want - came).max() < 5 * np.sqrt(0.25 * 2 / num)


@pytest.mark.parametrize(
    ("aspect", "box"), [(8.0, [0, 33, 80, 13]), (1 / 8, [33, 0, 13, 80]), (1.0, [0, 0, 80, 80])]
)
def test_a_crop_that_never_fits_becomes_the_largest_central_box(aspect: float, box: list[int]) -> None:
    boxes = draw_boxes(
        torch.rand(50, NUM_BOX_DRAWS).clamp(min=0.4),
        height=80,
        width=80,
        aspect=torch.full((50,), aspect),
        scale=(0.9, 1.0) if aspect != 1 else (1.0, 1.0),
        ratio=(3 / 4, 4 / 3) if aspect != 1 else (0.5, 1.5),
    )
    central = (boxes == torch.tensor(box)).all(1)
    assert central.all() if aspect != 1 else central.any()


@pytest.mark.parametrize("method", [resample_by_products, resample_by_slices])
def test_crops_equal_the_resized_crop_of_torchvision(method: Any, photos: np.ndarray) -> None:
    boxes = [(0, 0, 200, 200), (13, 40, 150, 101), (60, 7, 20, 33), (199, 199, 1, 1), (5, 0, 32, 32)]
    images, flip = photos[: len(boxes)], torch.arange(len(boxes)) % 2 == 1
    came = method(torch.from_numpy(images), torch.tensor(boxes), flip, size=32)
    for box, mirrored, plane, result in zip(boxes, flip, as_planes(images), came, strict=True):
        want = tvf.resized_crop(plane.float(), *box, [32, 32], antialias=True)
        want = want.flip(2) if mirrored else want
        # The sliced kernel rounds to integer gray levels, as torchvision does on bytes.
        torch.testing.assert_close(
            result, want, rtol=0, atol=2e-3 if method is resample_by_products else 1.01
        )
        assert (result - want).abs().mean() < 0.35


# Rotation


@pytest.mark.parametrize("degrees", [0.0, 17.5, -30.0, 90.0, 180.0])
def test_rotation_equals_the_one_of_torchvision(degrees: float, photos: np.ndarray) -> None:
    planes = as_planes(squares(photos, 48)).float()
    want = tvf.rotate(planes, degrees, transforms.InterpolationMode.BILINEAR)
    torch.testing.assert_close(rotate(planes, torch.full((len(planes),), degrees)), want, rtol=0, atol=0.02)


def test_each_image_is_rotated_by_its_own_angle_from_the_full_range() -> None:
    # A line from the middle to the right: its direction gives the angle.
    line = np.zeros((2_000, 65, 65, 3), dtype=np.uint8)
    line[:, 31:34, 32:] = 255
    views = views_of(line, rotation=40.0)[:, 0]
    offset = torch.arange(65) - 32.0
    up, right = -(views.sum(2) * offset).sum(1), (views.sum(1) * offset).sum(1)
    angles = torch.rad2deg(torch.atan2(up, right)).numpy()
    assert angles.min() >= -41
    assert angles.max() <= 41
    counts, _ = np.histogram(angles, bins=8, range=(-41, 41))
    assert chisquare(counts).pvalue > 1e-3


def test_rotation_does_not_change_any_other_draw(photos: np.ndarray) -> None:
    images = squares(photos, 32)
    still, turned = (
        views_of(images, crop_scale=(0.2, 1.0), flip=0.5, rotation=rotation) for rotation in (0.0, 25.0)
    )
    draws = uniforms(np.arange(len(photos)), **WHEN, num=9 + NUM_BOX_DRAWS + 1)
    torch.testing.assert_close(turned, rotate(still, (2 * draws[:, -1] - 1) * 25.0), rtol=0, atol=1e-5)
    assert not torch.equal(turned, still)


# Color


def colored(pixels: Tensor, **factors: float | bool) -> Tensor:
    """Recolor [n, channels, size, size] in [0, 1] by fixed factors."""
    settings = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0} | factors
    grayscale = torch.full((len(pixels),), bool(settings.pop("grayscale", False)))
    tensors = {name: torch.full((len(pixels),), float(x)) for name, x in settings.items()}
    channels = pixels.shape[1]
    matrix, gray_share = color_transform(**tensors, grayscale=grayscale, channels=channels)
    return recolor(pixels * 255, matrix, gray_share, mean=(0.0,) * channels, std=(1.0,) * channels)


@pytest.fixture(scope="module")
def muted(photos: np.ndarray) -> Tensor:
    """Return photos between 0.35 and 0.55, which stay in [0, 1] under all factors below."""
    return 0.35 + 0.2 * as_planes(squares(photos, 64)).float() / 255


@pytest.mark.parametrize("factor", [0.2, 0.7, 1.0, 1.4, 1.8])
@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_each_color_factor_has_the_same_effect_as_in_torchvision(
    name: str, factor: float, muted: Tensor
) -> None:
    want = getattr(tvf, f"adjust_{name}")(muted, factor)
    # torchvision's grayscale weights sum to 0.9999.
    torch.testing.assert_close(colored(muted, **{name: factor}), want, rtol=0, atol=3e-4)


def test_color_steps_are_applied_in_the_documented_order(muted: Tensor) -> None:
    steps = {"brightness": 1.2, "contrast": 0.7, "saturation": 0.3, "hue": 0.12, "grayscale": True}
    for number in range(1, len(steps) + 1):
        first, one_by_one = dict(list(steps.items())[:number]), muted
        for name, factor in first.items():
            one_by_one = colored(one_by_one, **{name: factor})
        torch.testing.assert_close(colored(muted, **first), one_by_one, rtol=0, atol=1e-5)


def test_grayscale_equals_the_one_of_torchvision_and_colors_are_clamped(photos: np.ndarray) -> None:
    pixels = as_planes(photos[:4]).float() / 255
    want = tvf.rgb_to_grayscale(pixels, num_output_channels=3)
    torch.testing.assert_close(colored(pixels, grayscale=True), want, rtol=0, atol=3e-4)
    came = colored(pixels, brightness=1.8)
    torch.testing.assert_close(came, tvf.adjust_brightness(pixels, 1.8), rtol=0, atol=1e-5)
    assert came.max() <= 1
    assert colored(pixels, contrast=1.8).min() >= 0


@pytest.mark.parametrize("turns", [-0.2, -0.1, -0.05, 0.05, 0.1, 0.2])
def test_hue_shifts_match_torchvision_on_photographs(turns: float, photos: np.ndarray) -> None:
    pixels = as_planes(photos).float() / 255
    want = tvf.adjust_hue(pixels, turns)
    change = (want - pixels).abs().mean()
    error = (colored(pixels, hue=turns) - want).abs().mean()
    wrong_way = (colored(pixels, hue=-turns) - want).abs().mean()
    # An approximation: HSV keeps the largest and the smallest channel, we keep their mean.
    assert error < min(0.05, 0.9 * change, 0.45 * wrong_way)


@pytest.mark.parametrize("turns", [1 / 3, -1 / 3])
def test_hue_maps_pure_colors_to_pure_colors_and_keeps_the_mean(turns: float, muted: Tensor) -> None:
    pixels = torch.eye(3)[:, :, None, None].expand(-1, -1, 8, 8).contiguous()
    torch.testing.assert_close(colored(pixels, hue=turns), tvf.adjust_hue(pixels, turns), rtol=0, atol=1e-5)
    gray = muted.mean(1, keepdim=True).expand(-1, 3, -1, -1).contiguous()
    torch.testing.assert_close(colored(gray, hue=turns / 2), gray, rtol=0, atol=1e-6)
    torch.testing.assert_close(colored(muted, hue=turns / 2).mean(1), muted.mean(1), rtol=0, atol=1e-6)


def test_one_channel_gets_brightness_and_contrast_only() -> None:
    pixels = 0.35 + 0.2 * as_planes(noise(4, 32, channels=1)).float() / 255
    settings = {"saturation": 0.1, "hue": 0.2, "grayscale": True}
    torch.testing.assert_close(colored(pixels, **settings), pixels, rtol=0, atol=1e-6)
    want = tvf.adjust_contrast(tvf.adjust_brightness(pixels, 1.2), 0.5)
    came = colored(pixels, brightness=1.2, contrast=0.5, **settings)
    torch.testing.assert_close(came, want, rtol=0, atol=1e-5)


# Blur


def shifted(pixels: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    blurred = pixels.clone()
    blur_by_shifts(list(blurred), sigma)
    return blurred


@pytest.mark.parametrize(
    "method", [blur_by_products, shifted, lambda pixels, sigma: blur(pixels.clone(), sigma)]
)
@pytest.mark.parametrize(
    ("size", "channels", "kernel"), [(8, 3, 3), (32, 1, 3), (33, 3, 3), (96, 3, 9), (224, 3, 23)]
)
def test_blur_equals_the_one_of_torchvision(method: Any, size: int, channels: int, kernel: int) -> None:
    sigma = torch.tensor([0.1, 0.5, 1.0, 2.0])
    pixels = torch.rand(4, channels, size, size, generator=torch.Generator().manual_seed(0))
    for image, result, width in zip(pixels, method(pixels, sigma), sigma.tolist(), strict=True):
        want = tvf.gaussian_blur(image, [kernel] * 2, [width] * 2)
        torch.testing.assert_close(result, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [32, 96])
def test_a_sigma_of_0_leaves_an_image_unchanged(size: int) -> None:
    before = torch.rand(4, 3, size, size, generator=torch.Generator().manual_seed(0))
    after = blur(before.clone(), torch.tensor([0.0, 0.7, 0.0, 2.0]))
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert torch.equal(after[[3, 1]], blur(before[[3, 1]], torch.tensor([2.0, 0.7])))
    assert not torch.equal(after[[3, 1]], before[[3, 1]])


# Probabilities and ranges


def test_each_transform_is_applied_with_its_probability(photos: np.ndarray) -> None:
    image = np.repeat(squares(photos, 16)[:1], 3_000, axis=0)
    source = as_planes(image[:1]).float() / 255
    for name, probability in (("flip", 0.3), ("jitter", 0.8), ("grayscale", 0.2), ("blur", 0.5)):
        views = views_of(image, **{name: probability}, blur_sigma=(0.5, 2.0))
        changed = (views - source).abs().amax((1, 2, 3)) > 1e-4
        assert changed.float().mean().item() == pytest.approx(probability, abs=0.04), name
        if name == "flip":
            torch.testing.assert_close(
                views[changed], source.flip(3).expand_as(views[changed]), rtol=0, atol=1e-5
            )


@pytest.mark.parametrize("strength", [0.5, 1.5])
def test_factors_are_drawn_from_the_ranges_of_torchvision(strength: float) -> None:
    # A flat image at 40: only brightness sets its level, without clamping.
    flat = np.full((4_000, 8, 8, 3), 40, dtype=np.uint8)
    views = views_of(flat, jitter=1.0, brightness=strength, contrast=0.0, saturation=0.0, hue=0.0)
    assert_uniform(views.mean((1, 2, 3)) * 255 / 40, max(0.0, 1 - strength), 1 + strength)


def test_hue_shifts_are_drawn_uniformly_in_both_directions() -> None:
    reddish = np.tile(np.array([150, 100, 100], dtype=np.uint8), (4_000, 8, 8, 1))
    views = views_of(reddish, jitter=1.0, brightness=0.0, contrast=0.0, saturation=0.0, hue=0.2)
    red, green, blue = views[:, :, 4, 4].unbind(1)
    turns = torch.atan2(np.sqrt(3) * (green - blue), 2 * red - green - blue) / (2 * np.pi)
    assert_uniform(turns, -0.2, 0.2, slack=1e-4)


def test_blur_widths_are_drawn_uniformly_from_their_range() -> None:
    points = np.zeros((2_000, 40, 40, 1), dtype=np.uint8)
    points[:, 20, 20] = 255
    views = views_of(points, blur=1.0, blur_sigma=(0.3, 1.2))
    # Two pixels of a Gaussian determine its width.
    assert_uniform(torch.sqrt(-0.5 / torch.log(views[:, 0, 20, 21] / views[:, 0, 20, 20])), 0.3, 1.2)


# Complete views


@pytest.mark.parametrize(("size", "stored"), [(8, 8), (8, 40), (32, 32), (224, 64)])
@pytest.mark.parametrize("channels", [1, 3])
def test_views_are_normalized_floats_in_channels_last(size: int, stored: int, channels: int) -> None:
    images = noise(9, stored, channels=channels)
    mean, std = (0.5,) * channels, (0.25,) * channels
    augmentation = ImageAugmentation(size=size, channels=channels, mean=mean, std=std)
    views = augmentation(images, np.arange(9), **WHEN)
    assert views.shape == (9, channels, size, size)
    assert views.dtype == torch.float32
    assert views.is_contiguous(memory_format=torch.channels_last)
    assert views.min() >= -2 - 1e-5
    assert views.max() <= 2 + 1e-5
    assert augmentation(images[:0], np.arange(0), **WHEN).shape[0] == 0


def test_transforms_of_probability_0_do_nothing_and_of_1_change_every_image(photos: np.ndarray) -> None:
    images = squares(photos, 32)
    planes = as_planes(images).float() / 255
    want = tvf.normalize(planes, list(MEAN), list(STD))
    torch.testing.assert_close(views_of(images, mean=MEAN, std=STD), want, rtol=0, atol=1e-4)
    want = tvf.rgb_to_grayscale(planes, num_output_channels=3)
    want = tvf.gaussian_blur(want.flip(3), [3, 3], [1.5, 1.5])
    views = views_of(images, flip=1.0, grayscale=1.0, blur=1.0, blur_sigma=(1.5, 1.5))
    torch.testing.assert_close(views, want, rtol=0, atol=3e-4)


@pytest.mark.parametrize("size", [32, 64])
def test_many_views_have_the_statistics_of_torchvision(size: int, photos: np.ndarray) -> None:
    images = squares(photos, size)
    repeats = 15 if size == 32 else 8
    pipeline = transforms.Compose(
        [
            transforms.RandomResizedCrop(size, scale=(0.08, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply([transforms.ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8),
            transforms.RandomGrayscale(0.2),
            transforms.RandomApply([transforms.GaussianBlur(kernel_size(size), (0.1, 2.0))], 0.5),
        ]
    )
    torch.manual_seed(0)
    theirs = torch.stack([pipeline(image) for _ in range(repeats) for image in as_planes(images)]) / 255
    num = 8 * repeats * len(images)
    ours = ImageAugmentation(size=size, **PLAIN)(
        np.tile(images, (8 * repeats, 1, 1, 1)), np.arange(num), **WHEN
    )

    def summary(views: Tensor) -> dict[str, Tensor]:
        return {
            "mean": views.mean((1, 2, 3)),
            "spread": views.std((1, 2, 3)),
            "sharpness": (views[..., 1:] - views[..., :-1]).abs().mean((1, 2, 3)),
            "color": views.std(1).mean((1, 2)),
            "dark": (views < 0.05).float().mean((1, 2, 3)),
            "bright": (views > 0.95).float().mean((1, 2, 3)),
        }

    came = summary(ours)
    for name, values in summary(theirs).items():
        # Five standard errors, plus a margin for the fixed order and the different hue.
        limit = 5 * values.std().item() / len(values) ** 0.5 + 0.01
        assert abs(came[name].mean() - values.mean()).item() < limit, name


@pytest.mark.parametrize(("size", "stored"), [(32, 32), (32, 40), (96, 120), (224, 200)])
def test_center_view_equals_resize_and_normalize_of_torchvision(
    size: int, stored: int, photos: np.ndarray
) -> None:
    images = squares(photos, stored)
    came = center_view(images, size=size, mean=MEAN, std=STD)
    planes = as_planes(images).float()
    want = tvf.normalize(tvf.resize(planes, [size, size]) / 255, list(MEAN), list(STD))
    assert came.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(came, want, rtol=0, atol=1.01 / 255 / min(STD))
    assert (came - want).abs().mean() < 0.5 / 255 / min(STD)
    if stored == size:
        torch.testing.assert_close(came, want, rtol=0, atol=1e-6)


def test_views_of_squashed_images_look_like_views_of_the_originals(photos: np.ndarray) -> None:
    # With the aspect, a crop of ratio 1 of a 2:1 image spans half the width of its square.
    images, ids = squares(photos, 64), np.arange(len(photos))
    augmentation = ImageAugmentation(size=32, **(STILL | {"crop_scale": (0.5, 0.5)}), **PLAIN)
    came = augmentation(images, ids, **WHEN, aspect=np.full(len(images), 2.0, dtype=np.float32))
    for image, view in zip(as_planes(images).float() / 255, came, strict=True):
        candidates = torch.stack([tvf.resized_crop(image, 0, left, 64, 32, [32, 32]) for left in range(33)])
        # Equal up to the rounding to bytes.
        assert (candidates - view).abs().amax((1, 2, 3)).min() < 1.01 / 255


def test_a_stored_image_that_is_not_square_has_its_original_shape(photos: np.ndarray) -> None:
    images, ids = np.ascontiguousarray(photos[:, :100]), np.arange(len(photos))
    augmentation = ImageAugmentation(size=32, mean=MEAN, std=STD)
    want = augmentation(images, ids, **WHEN, aspect=np.full(len(ids), 2.0, dtype=np.float32))
    assert torch.equal(augmentation(images, ids, **WHEN), want)


def test_read_only_and_strided_arrays_give_the_same_views_unmodified(photos: np.ndarray) -> None:
    images, ids = squares(photos, 32), np.arange(len(photos))
    augmentation = ImageAugmentation(size=32, mean=MEAN, std=STD)
    want = augmentation(images, ids, **WHEN)
    frozen, frozen_ids = images.copy(), ids.copy()
    frozen.flags.writeable = frozen_ids.flags.writeable = False
    assert torch.equal(augmentation(frozen, frozen_ids, **WHEN), want)
    upside_down = np.ascontiguousarray(images[:, ::-1])[:, ::-1]
    assert torch.equal(augmentation(upside_down, ids, **WHEN), want)
    assert torch.equal(augmentation(torch.from_numpy(images), ids, **WHEN), want)
    assert (images == frozen).all()


# Refusals


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("size", [7, 32.0]),
        ("channels", [2]),
        *((name, [1.5, -0.1, float("nan")]) for name in ("flip", "jitter", "grayscale", "blur")),
        *((name, [-1.0, float("inf")]) for name in ("brightness", "contrast", "saturation")),
        ("hue", [0.6]),
        ("rotation", [181.0]),
        ("crop_scale", [(0.0, 1.0), (0.9, 0.2), (0.5, 1.2)]),
        ("crop_ratio", [(1.0, float("inf"))]),
        ("blur_sigma", [(0.0, 2.0)]),
        ("mean", [(0.5,), (0.5, 0.5, float("nan"))]),
        ("std", [(0.2, 0.2), (0.2, 0.2, 0.0)]),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"^{name} .*got .*; give"):
            ImageAugmentation(**({"size": 32, "mean": MEAN, "std": STD} | {name: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": noise(4, 32).astype(np.float32)}, "images"),
        ({"images": torch.zeros(4, 3, 32, 32, dtype=torch.uint8)}, "images"),
        ({"images": noise(4, 32)[0]}, "images"),
        ({"images": noise(4, 32, channels=1)}, "images"),
        ({"sample_id": np.arange(3)}, "sample_id"),
        ({"sample_id": np.arange(4.0)}, "sample_id"),
        ({"sample_id": np.zeros((4, 1), dtype=np.int64)}, "sample_id"),
        ({"epoch": np.arange(3)}, "sample_id and epoch"),
        ({"epoch": 0.5}, "epoch"),
        ({"aspect": np.ones(3)}, "aspect"),
        ({"aspect": np.array([1.0, 1.0, 0.0, 1.0])}, "aspect"),
        ({"aspect": np.array([1.0, 1.0, np.nan, 1.0])}, "aspect"),
    ],
)
def test_arrays_of_invalid_shape_or_dtype_are_refused(changes: dict[str, Any], message: str) -> None:
    augmentation = ImageAugmentation(size=32, mean=MEAN, std=STD)
    arguments = {"images": noise(4, 32), "sample_id": np.arange(4), "epoch": 0} | changes
    with pytest.raises(ConfigError, match=rf"^{message} .*got .*; give"):
        augmentation(**arguments, seed=0, view=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 4}, "size"),
        ({"mean": (0.5,)}, "mean"),
        ({"images": noise(2, 32).astype(np.int64)}, "images"),
    ],
)
def test_center_view_refuses_invalid_settings_and_images(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        center_view(**({"images": noise(2, 32), "size": 32, "mean": MEAN, "std": STD} | changes))
