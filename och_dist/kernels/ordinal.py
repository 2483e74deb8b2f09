"""The ordinal loss of OCH and its gradient: near pairs should look closer than far pairs.

An anchor i relates every landmark as near, far or neither. With relaxed codes H = tanh(g (u V + b)) and
T = H_anchor H_landmark^T the loss is the mean of sigmoid((T_il - T_ij) / 2) over near j and far l of the same
anchor (the paper's Eq. 14, as D = (r - T) / 2), blended with the same mean where l is far from *another*
anchor (the quartic part of the ordinal graph, Eq. 6-7), which makes distances comparable across queries.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from och_dist.errors import BadInputError

__all__ = ["FAR", "NEAR", "NEITHER", "near_sets", "ordinal_loss_and_gradient"]

NEAR, NEITHER, FAR = 1, 0, -1

# Many running sums instead of one: the compiler may use vector registers without changing the order of
# additions, so the result does not depend on how it does so.
_LANES = 32

# Where exp(T / 2) can leave the range of float32. Beyond the range of float64 the loss is flat.
_BITS_FLOAT32, _BITS_FLOAT64 = 160, 1400


def near_sets(distances: np.ndarray, exclude: np.ndarray, k: int) -> np.ndarray:
    """Relation of each landmark to each anchor.

    Parameters
    ----------
    distances
        (m, S) true distances, or anything that orders each row the same way.
    exclude
        (m, S) bool, pairs that relate to nothing: an anchor that is its own landmark.
    k
        Size of the near set; each row needs at least ``k`` landmarks that are not excluded.

    Returns
    -------
    (m, S) int8: NEAR for the ``k`` nearest (the first of equals), FAR for those strictly farther than all of
    them, NEITHER for excluded pairs and for ties with the k-th, whose order nobody knows.
    """
    usable = distances.shape[1] - int(exclude.sum(axis=1).max(initial=0))
    if not 1 <= k <= usable:
        raise BadInputError(f"near set of {k} among {usable} landmarks; use 1 to {max(usable, 1)}")
    masked = np.where(exclude, np.inf, distances)
    kth = np.partition(masked, k - 1, axis=1)[:, k - 1]
    return _relations(masked, kth, exclude, k)


@njit(nogil=True)
def _relations(distances, kth, exclude, k):  # type: ignore[no-untyped-def]
    m, count = distances.shape
    out = np.zeros((m, count), dtype=np.int8)
    for i in range(m):
        limit = kth[i]
        room = k
        for j in range(count):
            if distances[i, j] < limit:
                room -= 1
        for j in range(count):
            if exclude[i, j]:
                continue
            value = distances[i, j]
            if value < limit:
                out[i, j] = 1
            elif value > limit:
                out[i, j] = -1
            elif room > 0:
                out[i, j] = 1
                room -= 1
    return out


@njit(nogil=True)
def _compact(values, relations, wanted, out):  # type: ignore[no-untyped-def]
    """Gather the values of one relation into ``out``, zero up to whole lanes; returns their number."""
    count = 0
    for j in range(values.shape[0]):
        if relations[j] == wanted:
            out[count] = values[j]
            count += 1
    for j in range(count, min(out.shape[0], count + _LANES)):
        out[j] = 0
    return count


# error_model: a test for a zero divisor, which cannot occur, would keep the loop from using vector registers.
@njit(nogil=True, error_model="numpy")
def _pair_sums(near, n_near, far, n_far, near_slope, far_slope):  # type: ignore[no-untyped-def]
    """Sum of p = far / (near + far) over all pairs; the slopes p (1 - p) are added to both sides."""
    groups = (n_far + _LANES - 1) // _LANES
    totals = np.zeros(_LANES, dtype=far.dtype)
    slopes = np.empty(_LANES, dtype=far.dtype)
    one = far.dtype.type(1)
    for j in range(n_near):
        value = near[j]
        slopes[:] = 0
        for group in range(groups):
            base = group * _LANES
            for lane in range(_LANES):
                p = far[base + lane] / (far[base + lane] + value)
                slope = p * (one - p)
                totals[lane] += p
                slopes[lane] += slope
                far_slope[base + lane] += slope
        near_slope[j] += slopes.sum()
    return totals.sum()


@njit(nogil=True)
def _scatter(slope, relations, wanted, weight, out):  # type: ignore[no-untyped-def]
    count = 0
    for j in range(out.shape[0]):
        if relations[j] == wanted:
            out[j] += weight * slope[count]
            count += 1


@njit(nogil=True)
def _relation_sums(powers, relations, shift):  # type: ignore[no-untyped-def]
    """Unnormalised loss and its derivative by T for near sets of i against far sets of i + shift.

    ``powers`` (m, S) is exp(T / 2): the sigmoid of a difference is then one division. Returns the sum over
    all relations, their number, and the (m, S) sum of slopes p (1 - p) / 2 with their signs.
    """
    m, count = powers.shape
    near = np.empty(count + _LANES, dtype=powers.dtype)
    far = np.empty(count + _LANES, dtype=powers.dtype)
    near_slope = np.empty(count + _LANES, dtype=powers.dtype)
    far_slope = np.empty(count + _LANES, dtype=powers.dtype)
    out = np.zeros((m, count), dtype=powers.dtype)
    total = 0.0
    pairs = 0
    half = powers.dtype.type(0.5)
    for i in range(m):
        other = (i + shift) % m
        n_near = _compact(powers[i], relations[i], 1, near)
        n_far = _compact(powers[other], relations[other], -1, far)
        near_slope[:n_near] = 0
        far_slope[:] = 0
        total += _pair_sums(near, n_near, far, n_far, near_slope, far_slope)
        pairs += n_near * n_far
        _scatter(near_slope, relations[i], 1, -half, out[i])
        _scatter(far_slope, relations[other], -1, half, out[other])
    return total, pairs, out


def _powers(similarity: np.ndarray, bits: int) -> np.ndarray:
    """exp(T / 2), finite and above zero: in float64 where |T| <= bits could leave the range of float32."""
    dtype = similarity.dtype if bits <= _BITS_FLOAT32 else np.dtype(np.float64)
    return np.exp(0.5 * np.clip(similarity.astype(dtype, copy=False), -_BITS_FLOAT64, _BITS_FLOAT64))


def _loss_and_slope(
    similarity: np.ndarray, powers: np.ndarray, relations: np.ndarray, shift: int
) -> tuple[float, np.ndarray]:
    """Mean loss over the relations of near sets with far sets ``shift`` anchors on, and dF/dT (m, S)."""
    total, pairs, slope = _relation_sums(powers, relations, shift)
    if pairs == 0:
        return 0.0, np.zeros_like(similarity)
    slope[np.abs(similarity) > _BITS_FLOAT64] = 0
    return total / pairs, (slope / powers.dtype.type(pairs)).astype(similarity.dtype, copy=False)


def ordinal_loss_and_gradient(
    u_anchors: np.ndarray,
    u_landmarks: np.ndarray,
    relations: np.ndarray,
    frame: np.ndarray,
    offsets: np.ndarray,
    *,
    gain: float,
    shift: int = 0,
    cross_weight: float = 0.0,
) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss and its gradient by the frame V and the offsets b.

    Parameters
    ----------
    u_anchors, u_landmarks
        (m, p) and (S, p) reduced vectors, all float32 or all float64: the dtype of the computation.
    relations
        (m, S) int8 from :func:`near_sets`.
    frame, offsets
        V (p, r) and b (r,).
    gain
        Factor inside tanh.
    shift
        Cross relations compare the near set of anchor i with the far set of anchor (i + shift) mod m.
    cross_weight
        Share of the cross relations, 0 to 1; the relations of one anchor have the rest.

    Returns
    -------
    loss, dF/dV (p, r), dF/db (r,). The loss is 0 with a zero gradient when there is no relation at all.
    """
    dtype = u_anchors.dtype.type
    v, b, g = frame.astype(dtype, copy=False), offsets.astype(dtype, copy=False), dtype(gain)
    h_anchors = np.tanh(g * (u_anchors @ v + b))
    h_landmarks = np.tanh(g * (u_landmarks @ v + b))
    similarity = h_anchors @ h_landmarks.T
    powers = _powers(similarity, len(offsets))
    loss, slope = _loss_and_slope(similarity, powers, relations, 0)
    if cross_weight > 0:
        cross_loss, cross_slope = _loss_and_slope(similarity, powers, relations, shift)
        loss = (1 - cross_weight) * loss + cross_weight * cross_loss
        slope = dtype(1 - cross_weight) * slope + dtype(cross_weight) * cross_slope
    e_anchors = g * (1 - h_anchors * h_anchors) * (slope @ h_landmarks)
    e_landmarks = g * (1 - h_landmarks * h_landmarks) * (slope.T @ h_anchors)
    d_frame = u_anchors.T @ e_anchors + u_landmarks.T @ e_landmarks
    return float(loss), d_frame, e_anchors.sum(axis=0) + e_landmarks.sum(axis=0)
