"""The ordinal loss of OCH and its gradient: near pairs should look closer than far pairs.

An anchor i relates every landmark as near, far or neither. With relaxed codes H = tanh(g (u V + b)) and
T = H_anchor H_landmark^T the loss is the mean of sigmoid((T_il - T_ij) / 2) over near j and far l of the same
anchor (the paper's Eq. 14, as D = (r - T) / 2), blended with the same mean where l is far from *another*
anchor (the quartic part of the ordinal graph, Eq. 6-7), which makes distances comparable across queries.
"""

from __future__ import annotations

import numpy as np

from och_dist.errors import BadInputError
from och_dist.kernels.compiled import njit

NEAR, NEITHER, FAR = 1, 0, -1

# Many running sums instead of one: the compiler may use vector registers without changing the order of
# additions, so the result does not depend on how it does so.
_LANES = 32

# Where exp(T / 2) can leave the range of float32. Beyond the range of float64 the loss is flat.
_BITS_FLOAT32, _BITS_FLOAT64 = 160, 1400


def near_sets(distances: np.ndarray, exclude: np.ndarray, k: int) -> np.ndarray:
    """Relation (m, S) int8 of each landmark to each anchor, from true ``distances`` (m, S) or what orders rows as they.

    NEAR are the ``k`` nearest (the first of equals), FAR those strictly farther than all of them. NEITHER are ties with
    the k-th, whose order nobody knows, and pairs to ``exclude`` (m, S) bool: an anchor that is its own landmark. Each
    row needs at least ``k`` landmarks that are not excluded.
    """
    usable = distances.shape[1] - int(exclude.sum(axis=1).max(initial=0))
    if not 1 <= k <= usable:
        raise BadInputError(f"near set of {k} among {usable} landmarks; use 1 to {max(usable, 1)}")
    return _relations(distances, exclude, k)


@njit(nogil=True)
def _relations(distances, exclude, k):  # type: ignore[no-untyped-def]
    m, count = distances.shape
    out = np.zeros((m, count), dtype=np.int8)
    least = np.empty(k, dtype=distances.dtype)
    for i in range(m):
        _smallest(distances[i], exclude[i], least)
        limit = least[k - 1]
        room = k - np.searchsorted(least, limit)
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
def _smallest(values, exclude, least):  # type: ignore[no-untyped-def]
    """Fill ``least`` with the smallest values that are not excluded, ascending; few, so that they are inserted."""
    k = least.shape[0]
    least[:] = np.inf
    for j in range(values.shape[0]):
        value = values[j]
        if value < least[k - 1] and not exclude[j]:
            place = k - 1
            while place > 0 and least[place - 1] > value:
                least[place] = least[place - 1]
                place -= 1
            least[place] = value


@njit(nogil=True)
def _compact(values, relations, near, far):  # type: ignore[no-untyped-def]
    """Gather the values of near and of far landmarks, the latter with zeros up to whole lanes; returns the counts."""
    n_near = 0
    n_far = 0
    for j in range(values.shape[0]):
        if relations[j] == -1:
            far[n_far] = values[j]
            n_far += 1
        elif relations[j] == 1:
            near[n_near] = values[j]
            n_near += 1
    far[n_far : n_far + _LANES] = 0
    return n_near, n_far


# error_model: a test for a zero divisor, which cannot occur, would keep the loop from using vector registers.
@njit(nogil=True, error_model="numpy")
def _pair_sums(near, n_near, far, n_far, factor, near_slope, far_slope):  # type: ignore[no-untyped-def]
    """Sum of p = far / (near + far) over all pairs; the slopes factor p (1 - p) are added to both sides."""
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
                slope = factor * p * (one - p)
                totals[lane] += p
                slopes[lane] += slope
                far_slope[base + lane] += slope
        near_slope[j] += slopes.sum()
    return totals.sum()


@njit(nogil=True)
def _scatter(near_slope, far_slope, relations, out):  # type: ignore[no-untyped-def]
    """The reverse of :func:`_compact`: a near landmark lowers the loss by being more similar, a far one raises it."""
    n_near = 0
    n_far = 0
    for j in range(out.shape[0]):
        if relations[j] == -1:
            out[j] = far_slope[n_far]
            n_far += 1
        elif relations[j] == 1:
            out[j] = -near_slope[n_near]
            n_near += 1


@njit(nogil=True)
def _loss_and_slope(powers, relations, shift, cross_weight):  # type: ignore[no-untyped-def]
    """The loss and dF/dT (m, S); see :func:`ordinal_loss_and_gradient`.

    ``powers`` (m, S) is exp(T / 2): the sigmoid of a difference is then one division.
    """
    m, count = powers.shape
    near = np.empty((m, count), dtype=powers.dtype)
    far = np.empty((m, count + _LANES), dtype=powers.dtype)
    n_near = np.empty(m, dtype=np.int64)
    n_far = np.empty(m, dtype=np.int64)
    for i in range(m):
        n_near[i], n_far[i] = _compact(powers[i], relations[i], near[i], far[i])
    near_slope = np.zeros_like(near)
    far_slope = np.zeros_like(far)
    loss = 0.0
    for step, weight in ((0, 1.0 - cross_weight), (shift, cross_weight)):
        pairs = 0
        for i in range(m):
            pairs += n_near[i] * n_far[(i + step) % m]
        if weight == 0 or pairs == 0:
            continue
        factor = powers.dtype.type(0.5 * weight / pairs)
        total = 0.0
        for i in range(m):
            j = (i + step) % m
            total += _pair_sums(near[i], n_near[i], far[j], n_far[j], factor, near_slope[i], far_slope[j])
        loss += weight * total / pairs
    slope = np.zeros_like(powers)
    for i in range(m):
        _scatter(near_slope[i], far_slope[i], relations[i], slope[i])
    return loss, slope


def _powers(similarity: np.ndarray, bits: int) -> np.ndarray:
    """exp(T / 2), finite and above zero: in float64 where |T| <= bits could leave the range of float32."""
    dtype = similarity.dtype if bits <= _BITS_FLOAT32 else np.dtype(np.float64)
    half = similarity.astype(dtype, copy=False) * dtype.type(0.5)
    return np.exp(half if bits <= _BITS_FLOAT64 else np.clip(half, -0.5 * _BITS_FLOAT64, 0.5 * _BITS_FLOAT64))


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
    """Loss and its gradient by the ``frame`` V (p, r) and the ``offsets`` b (r,), in the same shapes.

    ``u_anchors`` (m, p) and ``u_landmarks`` (S, p) are reduced vectors, all float32 or all float64: the dtype of the
    computation; ``relations`` (m, S) int8 those of :func:`near_sets`; ``gain`` is the factor inside tanh. Cross
    relations compare the near set of anchor i with the far set of anchor (i + ``shift``) mod m; their share of the loss
    is ``cross_weight``, 0 to 1. Without any relation loss and gradient are 0.
    """
    dtype = u_anchors.dtype.type
    v, b, g = frame.astype(dtype, copy=False), offsets.astype(dtype, copy=False), dtype(gain)
    h_anchors = np.tanh(g * (u_anchors @ v + b))
    h_landmarks = np.tanh(g * (u_landmarks @ v + b))
    similarity = h_anchors @ h_landmarks.T
    powers = _powers(similarity, len(offsets))
    loss, slope = _loss_and_slope(powers, relations, shift, float(cross_weight))
    if len(offsets) > _BITS_FLOAT64:
        slope[np.abs(similarity) > _BITS_FLOAT64] = 0
    slope = slope.astype(dtype, copy=False)
    e_anchors = g * (1 - h_anchors * h_anchors) * (slope @ h_landmarks)
    e_landmarks = g * (1 - h_landmarks * h_landmarks) * (slope.T @ h_anchors)
    d_frame = u_anchors.T @ e_anchors + u_landmarks.T @ e_landmarks
    return float(loss), d_frame, e_anchors.sum(axis=0) + e_landmarks.sum(axis=0)
