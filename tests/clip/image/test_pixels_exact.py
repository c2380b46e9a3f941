"""Our pixels against transformers' Gemma3ImageProcessor, before rescaling and normalising: the
difference is 0, not small.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from mtmd.clip.image.decode import open_picture
from mtmd.clip.image.resize import resize

MODES = ["RGB", "RGB with a clear colour", "L", "P", "P with a clear colour", "P with alpha", "RGBA opaque", "RGBA", "LA", "PA", "1",
         "CMYK", "YCbCr", "HSV"]  # fmt: skip
TARGETS = [(896, 896), (224, 224), (37, 53)]
FILTERS = ["bilinear", "bicubic", "lanczos", "nearest"]
PROCESSOR = Gemma3ImageProcessorPil(do_rescale=False, do_normalize=False)


def random_image(mode: str, seed: int) -> Image.Image:
    """A random picture of odd sides: noise over a gradient, so that both smooth and rough
    resampling are exercised.
    """
    random = np.random.default_rng(seed)
    height, width = (int(side) * 2 + 1 for side in random.integers(0, 160, 2))
    ramp = np.linspace(0, 200, width)[None, :, None] + np.zeros((height, 1, 4))
    rgba = Image.fromarray((ramp + random.integers(0, 56, (height, width, 4))).astype(np.uint8))
    rgb = rgba.convert("RGB")
    if mode == "RGBA":
        return rgba
    if mode == "RGBA opaque":
        return rgb.convert("RGBA")
    if mode in ("LA", "PA"):
        return rgba.convert(mode)
    if mode.startswith("P "):
        image = rgb.quantize(31)
        image.info["transparency"] = 3 if mode == "P with a clear colour" else random.bytes(31)
        return image
    if mode == "RGB with a clear colour":
        rgb.info["transparency"] = rgb.getpixel((width // 2, height // 2))
        return rgb
    return rgb.convert(mode)


def reference(image: Image.Image, width: int, height: int, resample: str) -> np.ndarray:
    size = {"height": height, "width": width}
    batch = PROCESSOR(
        image, size=size, resample=Image.Resampling[resample.upper()], return_tensors="np"
    )
    return batch["pixel_values"][0].transpose(1, 2, 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_pixels_equal_the_reference(mode, seed):
    image = random_image(mode, seed=100 * MODES.index(mode) + seed)
    width, height = TARGETS[seed % len(TARGETS)]
    expected = reference(image, width, height, FILTERS[seed])
    assert expected.dtype == np.uint8
    assert np.array_equal(
        resize(open_picture(image).pixels, width, height, FILTERS[seed]), expected
    )


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_files_equal_the_reference_reading_them_with_pillow(format_):
    buffer = io.BytesIO()
    random_image("RGB", seed=len(format_)).save(buffer, format_)
    expected = reference(Image.open(buffer), 224, 224, "bilinear")
    assert np.array_equal(
        resize(open_picture(buffer.getvalue()).pixels, 224, 224, "bilinear"), expected
    )


def test_where_we_differ_on_purpose():
    """Pillow clips 16-bit grey at 255 and drops premultiplied alpha, and so does the reference; we
    scale, and lay on white.
    """
    grey = Image.fromarray(np.array([[0, 300, 65535]], np.uint16))
    assert reference(grey, 3, 1, "nearest")[0, :, 0].tolist() == [0, 255, 255]
    assert open_picture(grey).pixels[0, :, 0].tolist() == [0, 1, 255]
    clear = Image.new("RGBA", (1, 1), (0, 0, 0, 0)).convert("RGBa")
    assert reference(clear, 1, 1, "nearest").max() == 0
    assert open_picture(clear).pixels.min() == 255
