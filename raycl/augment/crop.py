"""Random resized crops and rotations of a whole batch: torchvision's boxes, antialiased resizing."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

ATTEMPTS = 10  # as in torchvision: boxes tried before the central crop
NUM_BOX_DRAWS = 2 + 2 * ATTEMPTS

# Below this many multiplications per channel, two small matrix products for all images at once cost
# less on a CPU than one call of torch's resize kernel for each image (measured: 7 and 22 us per
# image at 32 pixels, 190 and 33 us at 96).
_MAX_PRODUCT = 2**16


def draw_boxes(
    draws: Tensor,
    *,
    height: int,
    width: int,
    aspect: Tensor,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Tensor:
    """Draw one crop box per image; int64 [n, 4]: top, left, height, width in stored pixels.

    Follows ``RandomResizedCrop`` of torchvision (Szegedy et al., 2015): the area is uniform, the
    ratio log-uniform, both in the image's original geometry, before it was resized to
    ``height`` x ``width``. A box that does not fit is drawn again, up to ``ATTEMPTS`` draws; then
    the largest central box of an allowed ratio is taken. ``draws`` are uniforms
    [n, NUM_BOX_DRAWS]; ``aspect`` [n] is the original width divided by the original height.
    """
    area = scale[0] + (scale[1] - scale[0]) * draws[:, 2 : 2 + ATTEMPTS]
    low, high = math.log(ratio[0]), math.log(ratio[1])
    stretch = torch.exp(low + (high - low) * draws[:, 2 + ATTEMPTS :]) / aspect[:, None]
    heights = (height * torch.sqrt(area / stretch)).round()
    widths = (width * torch.sqrt(area * stretch)).round()
    fits = (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)
    found = fits.any(1)
    first = fits.to(torch.uint8).argmax(1, keepdim=True)

    central_height = (height * (aspect / ratio[0]).clamp(max=1)).round().clamp(min=1)
    central_width = (width * (ratio[1] / aspect).clamp(max=1)).round().clamp(min=1)
    box_height = torch.where(found, heights.gather(1, first).squeeze(1), central_height)
    box_width = torch.where(found, widths.gather(1, first).squeeze(1), central_width)
    top = _offset(height - box_height, draws[:, 0], found)
    left = _offset(width - box_width, draws[:, 1], found)
    return torch.stack([top, left, box_height, box_width], dim=1).to(torch.int64)


def _offset(room: Tensor, draw: Tensor, found: Tensor) -> Tensor:
    # Uniform over 0 .. room; the minimum catches draws near 1 that round up.
    anywhere = torch.minimum((draw * (room + 1)).floor(), room)
    return torch.where(found, anywhere, (room / 2).floor())


def resample(images: Tensor, boxes: Tensor, flip: Tensor, *, size: int) -> Tensor:
    """Cut out each box, resize it to ``size`` x ``size``, and mirror it where ``flip`` is true.

    Takes uint8 [n, height, width, channels], boxes [n, 4] of whole numbers and bool [n], all on one
    device; returns float32 [n, channels, size, size] between 0 and 255.
    Bilinear, with the filter widened when the image shrinks, as torchvision's ``antialias=True``.
    """
    _, height, width, _ = images.shape
    if images.is_cuda or size * height * width <= _MAX_PRODUCT:
        return resample_by_products(images, boxes, flip, size=size)
    return resample_by_slices(images, boxes, flip, size=size)


def resample_by_products(images: Tensor, boxes: Tensor, flip: Tensor, *, size: int) -> Tensor:
    """Resample as rows @ image @ columns: few operations for any number of images."""
    num_images, height, width, channels = images.shape
    top, left, box_height, box_width = boxes.to(torch.float32).unbind(1)
    upright = torch.zeros_like(flip)
    rows = _interpolation(top, box_height, upright, size=size, length=height, device=images.device)
    columns = _interpolation(left, box_width, flip, size=size, length=width, device=images.device)
    planes = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    # Columns of all channels in one product; rows broadcast over the channels.
    planes = torch.bmm(planes.view(num_images, channels * height, width), columns.transpose(1, 2))
    return torch.matmul(rows[:, None], planes.view(num_images, channels, height, size))


def _interpolation(
    start: Tensor,
    extent: Tensor,
    mirror: Tensor,
    *,
    size: int,
    length: int,
    device: torch.device,
) -> Tensor:
    """Weights [n, size, length] that resize pixels start .. start + extent of a line to ``size``."""
    position = torch.arange(size, device=device, dtype=torch.float32) + 0.5
    position = torch.where(mirror[:, None], size - position, position)
    scale = (extent / size)[:, None]
    sharpness = 1 / scale.clamp(min=1)  # the triangle is one pixel wide, wider when shrinking
    pixel = torch.arange(length, device=device) + 0.5 - start[:, None]
    # Pixels outside the box get weight 0, so the crop does not see its surroundings.
    pixel = torch.where((pixel > 0) & (pixel < extent[:, None]), pixel, 1e9)
    distance = (pixel * sharpness)[:, None, :] - (position * scale * sharpness)[:, :, None]
    weights = distance.abs_().neg_().add_(1).clamp_(min=0)
    return weights.div_(weights.sum(2, keepdim=True))


def resample_by_slices(images: Tensor, boxes: Tensor, flip: Tensor, *, size: int) -> Tensor:
    """Resample image by image with torch's uint8 kernel, which rounds to whole gray levels."""
    num_images, _, _, channels = images.shape
    views = torch.empty(num_images, channels, size, size)
    for view, image, box, mirror in zip(views, images, boxes.long().tolist(), flip.tolist(), strict=True):
        top, left, height, width = box
        part = image[top : top + height, left : left + width].permute(2, 0, 1)[None]
        part = F.interpolate(part, size=(size, size), mode="bilinear", antialias=True)[0]
        view.copy_(part.flip(2) if mirror else part)
    return views


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Rotate square images [n, channels, size, size] counterclockwise by ``degrees`` [n].

    Bilinear; pixels from outside the image are 0, as in torchvision's ``RandomRotation``.
    """
    angle = torch.deg2rad(degrees.to(images.device))
    cosine, sine, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    # The source position of each pixel of the result; y points down.
    turn = torch.stack([cosine, -sine, zero, sine, cosine, zero], dim=1).view(-1, 2, 3)
    where = F.affine_grid(turn, list(images.shape), align_corners=False)
    return F.grid_sample(images, where, align_corners=False)
