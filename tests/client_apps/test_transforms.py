"""Transforms: windows of the padded image, mirrored or not, and normalisation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from client_apps.data.transforms import Normalise, random_crop_flip


def images(count: int = 64, channels: int = 3, side: int = 8) -> torch.Tensor:
    # Pixel values start at 1, so the zeros of the padding are recognisable.
    return torch.randint(1, 256, (count, channels, side, side), generator=torch.Generator().manual_seed(0)).byte()


def test_every_result_is_a_window_of_the_padded_image_or_its_mirror_image() -> None:
    before = images()
    after = random_crop_flip(before, torch.Generator().manual_seed(1))
    assert after.shape == before.shape
    assert after.dtype == torch.uint8
    padded = F.pad(before, (4, 4, 4, 4))
    places, sides = set(), set()
    for source, result in zip(padded, after, strict=True):
        windows = source.unfold(1, 8, 1).unfold(2, 8, 1)  # (c, 9, 9, 8, 8)
        for mirrored, candidate in ((False, result), (True, result.flip(-1))):
            hits = (windows == candidate[:, None, None]).all(dim=(0, 3, 4)).nonzero().tolist()
            if hits:
                places.add(tuple(hits[0]))
                sides.add(mirrored)
                break
        else:
            pytest.fail("not a window of the padded image")
    assert sides == {False, True}
    assert len(places) > 30  # 64 samples drew their own of 81 places


def test_without_padding_only_the_side_changes() -> None:
    before = images()
    after = random_crop_flip(before, torch.Generator().manual_seed(1), padding=0)
    kept = (after == before).flatten(1).all(1)
    mirrored = (after == before.flip(-1)).flatten(1).all(1)
    assert (kept ^ mirrored).all()
    assert 16 < int(mirrored.sum()) < 48


def test_only_the_given_generator_decides() -> None:
    before = images()
    state = torch.get_rng_state()
    first = random_crop_flip(before, torch.Generator().manual_seed(5))
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)
    torch.manual_seed(99)
    assert torch.equal(first, random_crop_flip(before, torch.Generator().manual_seed(5)))
    assert not torch.equal(first, random_crop_flip(before, torch.Generator().manual_seed(6)))


def test_the_device_does_not_change_the_windows(device: str) -> None:
    before = images()
    expected = random_crop_flip(before, torch.Generator().manual_seed(5))
    result = random_crop_flip(before.to(device), torch.Generator().manual_seed(5))
    assert torch.equal(result.cpu(), expected)


def test_normalise_follows_its_formula() -> None:
    mean, std = (0.5, 0.25, 0.0), (0.5, 0.25, 1.0)
    before = images()
    expected = (before.double() / 255 - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    result = Normalise(mean, std, torch.device("cpu"))(before)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-6)
