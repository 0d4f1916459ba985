"""Noise whose moments over its rows are those of its distribution."""

import pytest
import torch

from pyro_ngvi.linalg.noise import SharedNoise, centred, even, whitened


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


@pytest.mark.parametrize(("rows", "columns"), [(4, 3), (64, 3), (64, 31), (2, 1)])
def test_covariance_of_enough_white_rows_is_the_identity(rows: int, columns: int) -> None:
    x = whitened(noise(rows, columns))
    torch.testing.assert_close(x.mean(0), x.new_zeros(columns), atol=1e-12, rtol=0.0)
    torch.testing.assert_close(x.mT @ x / rows, torch.eye(columns).to(x))


@pytest.mark.parametrize(("rows", "columns"), [(2, 7), (16, 16), (8, 100)])
def test_fewer_rows_are_equally_wide_where_they_are_wide(rows: int, columns: int) -> None:
    x = whitened(noise(rows, columns))
    torch.testing.assert_close(x.mean(0), x.new_zeros(columns), atol=1e-12, rtol=0.0)
    widths = torch.linalg.eigvalsh(x @ x.mT / rows)
    expected = torch.full((rows,), columns / (rows - 1)).to(x)
    expected[0] = 0.0
    torch.testing.assert_close(widths, expected, atol=1e-12, rtol=1e-9)


def test_white_rows_point_anywhere() -> None:
    """Over 4,000 sets the mean of x x' of one row x is I, to 5 standard errors."""
    x = torch.stack([whitened(noise(6, 3, seed=s))[0] for s in range(4_000)])
    moments = x.unsqueeze(-1) * x.unsqueeze(-2)
    error = moments.std(0) / len(x) ** 0.5
    assert ((moments.mean(0) - torch.eye(3)).abs() < 5.0 * error).all()


def test_pieces_are_white_together_and_the_same_again() -> None:
    shared = SharedNoise(3)

    def piece(s: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        with shared.piece(s):  # two guides, of three and of one latent variables
            return even(noise(4, 3, seed=seed)), even(noise(4, 1, seed=seed))

    first = [piece(s, 10 + s) for s in range(3)]
    for of_one in zip(*first, strict=True):
        x = torch.cat(of_one)
        torch.testing.assert_close(x.mT @ x / 12, torch.eye(x.shape[1]).to(x))
        torch.testing.assert_close(x.mean(0), x.new_zeros(x.shape[1]), atol=1e-12, rtol=0.0)
    again = [piece(s, 20 + s) for s in (2, 0)]
    assert all(map(torch.equal, again[0], first[2])) and all(map(torch.equal, again[1], first[0]))


def test_outside_of_a_piece_rows_are_centred() -> None:
    x = noise(4, 3)
    shared = SharedNoise(2)
    with shared.piece(0):
        assert torch.equal(even(x[0]), x[0])  # of one particle under vmap
        assert not torch.equal(even(x), centred(x))
    assert torch.equal(even(x), centred(x))


def test_long_rows_are_not_kept() -> None:
    """They are at right angles but for a sixteenth, and a set of them for 10^6 latents takes 2 GB."""
    x = noise(4, 16 * 8)
    for pieces, is_centred in ((2, True), (3, False)):
        with SharedNoise(pieces).piece(0):
            assert torch.equal(even(x), centred(x)) is is_centred
