"""One PNG image as an array of bytes."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

_DEPTH = 24  # after the signature and, of the first chunk, IHDR: length, type, width and height


def decode(content: bytes, channels: int, side: int) -> NDArray[np.uint8]:
    """Decode a PNG file's content; grey levels become RGB and colours grey levels where `channels` asks for it.

    Returns
    -------
    ndarray of uint8, shape (channels, side, side)
        Pixels in 0..255; a view, not contiguous.

    Raises
    ------
    ValueError
        The content is no PNG, is damaged, or has another size or 16 bits a channel; the message says which, to follow
        "but".
    """
    mode = "RGB" if channels == 3 else "L"
    try:
        with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            if image.size != (side, side):  # known before any pixel is decoded
                raise ValueError(f"it has {image.width}x{image.height} pixels")
            if content[_DEPTH] == 16:  # Pillow would clip grey levels at 255 and drop the lower half of colours
                raise ValueError("it has 16 bits a channel")
            pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    except UnidentifiedImageError as error:
        raise ValueError("its content is no readable PNG") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow's words for a damaged PNG
        raise ValueError(f"it is damaged ({error})") from error
    return pixels.reshape(side, side, channels).transpose(2, 0, 1)
