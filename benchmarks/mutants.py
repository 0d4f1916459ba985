"""Whether the tests notice a wrong coefficient: small errors put into the mathematics, one at a time.

Run from the root of the repository: ``python -m benchmarks.mutants --help``.

A mutant replaces one piece of text in one file of a temporary copy of the checkout, and the test files
that ought to notice run on the copy until the first failure.  The table says which mutants die.  The
exit status is 0 when all of them do, except those for which a proof says that nothing changes.

Text that is not found exactly once is an error: the source has moved on, and so must its mutant.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: seconds for the tests of one mutant; an endless loop is noticed too
TIMEOUT = 300.0
PACKAGE, TESTS = "pyro_ngvi", "tests/exact"
#: exit codes of pytest: all passed, and some failed
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Mutant:
    """One error in the mathematics.

    Attributes:
        name: what is wrong, in words.
        path: the file, below ``pyro_ngvi``.
        old: a text that occurs exactly once in it.
        new: what stands there instead.
        tests: names of the files below ``tests/exact`` that should notice, the quickest first.
        equivalent: why nothing changes, for a mutant that nothing can notice.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def files(self) -> list[str]:
        return [f"{TESTS}/{name}.py" for name in self.tests]


RULES = (
    Mutant(
        "outliers: no floor of 1 nat",
        "optim/natural_gradient.py",
        "log_typical.exp().clamp_min(1.0)",
        "log_typical.exp()",
        ("test_trust_region", "test_one_step"),
    ),
    Mutant(
        "descent of the unshortened step",
        "optim/natural_gradient.py",
        '"descent": length * along,',
        '"descent": length * self.lr * gain * length,',
        ("test_trust_region", "test_one_step"),
    ),
    Mutant(
        "descent of the gradient without its past",
        "optim/natural_gradient.py",
        "along = shrink * (wanted + past_along)",
        "along = shrink * wanted",
        ("test_trust_region", "test_momentum"),
    ),
    Mutant(
        "share of signal: descent in another unit",
        "optim/natural_gradient.py",
        'cosine + state["descent"] / length) / length',
        'cosine + state["descent"]) / length',
        ("test_trust_region", "test_one_step"),
    ),
    Mutant(
        "memory of the typical length from a first guess of 0",
        "optim/natural_gradient.py",
        'torch.where(state["count"] == 0, length.log(), state["log_typical"])',
        'state["log_typical"]',
        ("test_trust_region", "test_one_step"),
    ),
    Mutant(
        "noise radius: b for sqrt(b)",
        "optim/natural_gradient.py",
        "self.noise_radius / shares * gain.sqrt()",
        "self.noise_radius / shares * gain",
        ("test_trust_region", "test_momentum"),
    ),
    Mutant(
        "radius grows with skipped steps",
        "optim/natural_gradient.py",
        "torch.exp2((PATIENCE - in_a_row).clamp_max(0.0))",
        "torch.exp2((in_a_row - PATIENCE).clamp_min(0.0))",
        ("test_trust_region",),
    ),
    Mutant(
        "momentum: cross term of the length once",
        "optim/natural_gradient.py",
        "added = 2.0 * wanted * past_along + past_energy",
        "added = wanted * past_along + past_energy",
        ("test_momentum",),
    ),
    Mutant(
        "momentum uphill",
        "optim/natural_gradient.py",
        'past = {name: self.momentum * state["move"][name] for name in names}',
        'past = {name: -self.momentum * state["move"][name] for name in names}',
        ("test_trust_region", "test_momentum"),
    ),
    Mutant(
        "noise clock: window c for c / 2",
        "optim/natural_gradient.py",
        "torch.clamp(0.5 * clock, min=self.min_window)",
        "torch.clamp(clock, min=self.min_window)",
        ("test_schedules",),
    ),
    Mutant(
        "noise clock: weights not squared",
        "optim/natural_gradient.py",
        'weight = (1 - a).square() * state["weight"] + a.square()',
        'weight = (1 - a) * state["weight"] + a.square()',
        ("test_schedules",),
    ),
    Mutant(
        "noise clock: a standard error added",
        "optim/natural_gradient.py",
        "(mean - self.standard_errors * error)",
        "(mean + self.standard_errors * error)",
        ("test_schedules",),
    ),
    Mutant(
        "noise clock: one signal too few in the first means",
        "optim/natural_gradient.py",
        "1.0 / count.clamp_min(1.0)",
        "1.0 / (count + 1.0)",
        ("test_schedules",),
    ),
    Mutant(
        "Robbins-Monro waits for noise",
        "optim/schedules.py",
        "advance = mean <= self.patience",
        "advance = mean >= self.patience",
        ("test_schedules",),
    ),
    Mutant(
        "tail average: eta for eta - 1",
        "optim/rule.py",
        "self.eta / (k + (self.eta - 1.0))",
        "self.eta / (k + self.eta)",
        ("test_schedules",),
    ),
    Mutant(
        "averages: weights of their noise not squared",
        "optim/rule.py",
        'square = (1.0 - rate).square() * state["average_square"] + rate.square()',
        'square = (1.0 - rate) * state["average_square"] + rate.square()',
        ("test_schedules",),
    ),
    Mutant(
        "rule: a refused step counts",
        "optim/rule.py",
        'refused = state | {"skipped": state["skipped"] + 1.0} | step.if_refused',
        'refused = state | {"count": count, "skipped": state["skipped"] + 1.0}',
        ("test_trust_region", "test_ivon"),
    ),
    Mutant(
        "the usual length is that of all gradients",
        "optim/natural_gradient.py",
        '(1.0 / (state["count"] + 1.0)).clamp_min(1.0 / MEMORY)',
        '(1.0 / (state["count"] + 1.0))',
        ("test_trust_region",),
    ),
    Mutant(
        "momentum: energy of the past once too large",
        "optim/natural_gradient.py",
        'self.momentum**2 * state["move_energy"]',
        'self.momentum * state["move_energy"]',
        ("test_trust_region", "test_momentum"),
    ),
    Mutant(
        "power decay from half of the scale",
        "optim/schedules.py",
        "self.scale / (1.0 + k**self.power)",
        "self.scale / (2.0 + k**self.power)",
        ("test_von",),
    ),
)

STEPS = (
    Mutant(
        "centred noise not widened",
        "linalg/noise.py",
        "(rows / (rows - 1)) ** 0.5 * (noise - mean)",
        "(noise - mean)",
        ("test_reach",),
    ),
    Mutant(
        "centred noise not centred",
        "linalg/noise.py",
        "* (noise - mean)",
        "* noise",
        ("test_reach",),
    ),
    Mutant(
        "reach grows after moves that were not shortened",
        "optim/natural_gradient.py",
        'state["growth"] * reach',
        "GROW * reach",
        ("test_reach",),
    ),
    Mutant(
        "reach of scales grows like that of a location",
        "optim/natural_gradient.py",
        "first[1:] -= STRICTER",
        "pass",
        ("test_reach",),
    ),
    Mutant(
        "reach grows at the first agreement",
        "optim/natural_gradient.py",
        "(damped & agrees)",
        "damped",
        ("test_reach",),
    ),
    Mutant(
        "flat globals looked at in one place",
        "hierarchy/probe.py",
        "torch.randn(transform",
        "torch.zeros(transform",
        ("test_blocks",),
    ),
    Mutant(
        "starts: rounding of an end is measured and forgotten",
        "guides/laplace.py",
        "q = replace(q, elbo=q.elbo - off, off=off)",
        "q = replace(q, off=off)",
        ("test_laplace_start",),
    ),
    Mutant(
        "starts: finalists with the rounding that put them there",
        "guides/laplace.py",
        "self.elbo(self.compared, p, FINAL, 2.0) - q.off",
        "self.elbo(self.compared, p, FINAL, 2.0)",
        ("test_laplace_start",),
    ),
    Mutant(
        "chains: states of one are worth as many draws",
        "diagnostics/moved.py",
        "worth = (K * middle.square().mean(0) / vb).clamp(1.0, K)",
        "worth = torch.ones_like(vb)",
        ("../statistical/test_diagnosis",),
    ),
    Mutant(
        "chains: the error of a mean as of single states",
        "diagnostics/moved.py",
        "mean_error = (middle - a).std(0)",
        "mean_error = (b[-1] - a).std(0)",
        ("../statistical/test_diagnosis",),
    ),
    Mutant(
        "chains: the error of an sd as of single states",
        "diagnostics/moved.py",
        "influence = (b.square().mean(0)",
        "influence = (b[-1].square()",
        ("../statistical/test_diagnosis",),
    ),
    Mutant(
        "verdict: a lack of prior mass by luck is taken for one",
        "diagnostics/verdict.py",
        "(math.log1p(2.0 * prior.error) if more_tell else 0.0)",
        "0.0",
        ("test_khat",),
    ),
    Mutant(
        "sites of units: C of data that do not grow",
        "hierarchy/unit_sites.py",
        "moving.cross + moving.g.unsqueeze(-1) * growth.unsqueeze(-2)",
        "moving.cross",
        ("test_hierarchy",),
    ),
    Mutant(
        "sites of units: C at the growth of the middle",
        "hierarchy/unit_sites.py",
        "_growth(away[moving.few], growth).mean(0)",
        "_growth(0.0 * away[moving.few], growth).mean(0)",
        ("test_hierarchy",),
    ),
    Mutant(
        "sites of units: Lambda is the mean Hessian, not that of the middle",
        "hierarchy/unit_sites.py",
        "positive_part(H.mean(0)) / size[:, None, None]",
        "positive_part(H.mean(0))",
        ("test_hierarchy",),
    ),
    Mutant(
        "sites of units: growth by all that the Hessian changes by",
        "hierarchy/unit_sites.py",
        "- (then - times[draws]) / times.mean(0)",
        "- 0.0 * (then - times[draws]) / times.mean(0)",
        ("test_hierarchy",),
    ),
    Mutant(
        "sites of units: nu without what C phi is on average",
        "hierarchy/unit_sites.py",
        "cross, times, away) / len(away)",
        "cross, times, away) / len(away) * 0.0",
        ("test_hierarchy",),
    ),
    Mutant(
        "scales of the data: roundings of the largest unit are those of all",
        "hierarchy/probe.py",
        "size.amax(-1, keepdim=True)",
        "size.amax()",
        ("test_hierarchy",),
    ),
    Mutant(
        "scales of the data: looked at near by alone",
        "hierarchy/probe.py",
        "SHARES = (0.1, 0.5)",
        "SHARES = (0.001,)",
        ("test_hierarchy",),
    ),
    Mutant(
        "corrected draws: what is smooth is noise",
        "diagnostics/draws.py",
        "(draws.log_joint[huge] - beside).abs() <= 1.0",
        "(draws.log_joint[huge] - beside).abs() <= -1.0",
        ("../statistical/test_by_slices",),
    ),
    Mutant(
        "starts: no mean field goes ahead",
        "guides/search.py",
        "begins_narrow = guide.begins_narrow and (d > FEW or not by_hessians) and UNASKED > 0",
        "begins_narrow = False",
        ("test_narrow_start",),
    ),
    Mutant(
        "units: no q(u | v) is led back to where the posterior is",
        "hierarchy/marginal.py",
        "better = (off & (_log_joint(units, given, found.white) >= here))[..., None]",
        "better = (off & (_log_joint(units, given, found.white) < here))[..., None]",
        ("test_collapse",),
    ),
    Mutant(
        "average: no trend begins it anew",
        "optim/rule.py",
        "return (trend > ON_ITS_WAY).any() & (k >= OLD)",
        "return (trend > 2.0).any() & (k >= OLD)",
        ("../contract/test_optim_state",),
    ),
    Mutant(
        "conjugate: a score that is off by its sd is of the posterior",
        "guides/member.py",
        "<= SHARE * curvature.sqrt()",
        "<= curvature.sqrt()",
        ("test_member_start",),
    ),
    Mutant(
        "conjugate: the curvature is half as large",
        "guides/member.py",
        "(before - after) / (2.0 * away)",
        "(before - after) / (4.0 * away)",
        ("test_member_start",),
    ),
    Mutant(
        "verdict: mass elsewhere is not looked for",
        "diagnostics/verdict.py",
        "missed = mass_elsewhere(fitted, draws, of_guide, batch_size) or missed",
        "missed = missed",
        ("test_elsewhere",),
    ),
    Mutant(
        "loo: by draws of a guide whose weights are of no use",
        "diagnostics/loo.py",
        'ends = None if weigh else getattr(verdict, "ends", None)',
        "ends = None",
        ("../statistical/test_leave_one_out_of_few",),
    ),
    Mutant(
        "corrected draws: none where the search for a start has ended",
        "diagnostics/by_weights.py",
        "        others = _ends(guide)\n",
        "        others: list[Place] = []\n",
        ("../statistical/test_by_slices",),
    ),
    Mutant(
        "minibatches of sites: what data see is not held against before",
        "sites/last_step.py",
        "counted = (sites[name][1] != 0.0).flatten(1).any(1)",
        "counted = (sites[name][1] < 0.0).flatten(1).any(1)",
        ("test_online_sites",),
    ),
    Mutant(
        "corrected draws: a proposal that is not defended",
        "diagnostics/proposal.py",
        "self._posterior = defended(q, wide or own, share, others)",
        "self._posterior = q",
        ("../statistical/test_by_slices",),
    ),
    Mutant(
        "mirror images: far by sds alone",
        "diagnostics/mirrors.py",
        "far | (disjoint & (sd > 0.0))",
        "far",
        ("test_mirrors",),
    ),
    Mutant(
        "a block goes back by chance",
        "fitting/falls.py",
        "-max(RISE, SURE * error)",
        "-min(RISE, SURE * error)",
        ("test_blocks",),
    ),
    Mutant(
        "reach never falls",
        "optim/natural_gradient.py",
        "SHRINK * reach",
        "reach",
        ("test_reach",),
    ),
    Mutant(
        "reach of scales up to d",
        "optim/natural_gradient.py",
        "reach[1:].clamp(max=entries[0] ** 0.5)",
        "reach[1:].clamp(max=entries[0])",
        ("test_reach",),
    ),
    Mutant(
        "radius of two blocks not shared",
        "optim/natural_gradient.py",
        "self.trust_radius / shares",
        "self.trust_radius",
        ("test_reach",),
    ),
    Mutant(
        "one block for location and scales",
        "optim/natural_gradient.py",
        "if location and rest:",
        "if False and location and rest:",
        ("test_reach",),
    ),
    Mutant(
        "share of the path: trace, not its mean",
        "optim/natural_gradient.py",
        "dot(dilation, grads) / self.family.dim(params)",
        "dot(dilation, grads)",
        ("test_reach",),
    ),
    Mutant(
        "share of the path: entropy with the wrong sign",
        "guides/base.py",
        "share) - (entropy",
        "share) + (entropy",
        ("test_reach",),
    ),
    Mutant(
        "dilation of a precision by half",
        "families/factor_base.py",
        "params[self.diagonal], self.sign * self.power",
        "params[self.diagonal], self.sign",
        ("test_reach",),
    ),
    Mutant(
        "Newton steps towards saddles",
        "linalg/hessian.py",
        "h = h.abs()",
        "h = h.clone()",
        ("test_laplace_start",),
    ),
    Mutant(
        "BFGS: curvature below zero taken",
        "linalg/hessian.py",
        "along > 1e-8 * (s.norm(dim=-1, keepdim=True) * y.norm(dim=-1, keepdim=True))",
        "along != 0.0",
        ("test_laplace_start",),
    ),
    Mutant(
        "BFGS: second term left out",
        "linalg/hessian.py",
        "(1.0 + (y * w).sum(-1, keepdim=True) / root)",
        "1.0",
        ("test_laplace_start",),
    ),
    Mutant(
        "Newton takes steps that rise",
        "guides/laplace.py",
        "if bool(self.f(new.unsqueeze(0))[0] < value):",
        "if True:",
        ("test_laplace_start",),
    ),
    Mutant(
        "start: log q of the draws left out",
        "guides/laplace.py",
        ".split(ROWS)]) - family.log_prob(params, z)",
        ".split(ROWS)])",
        ("test_laplace_start",),
    ),
    Mutant(
        "start: expectations at the mean alone",
        "guides/laplace.py",
        "self.f(x + away, self.d).mean()",
        "self.f(x + 0 * away, self.d).mean()",
        ("test_laplace_start",),
    ),
    Mutant(
        "start: steps on expectations without their Hessian",
        "guides/expectations.py",
        "torch.lerp(precision, H, share)",
        "precision",
        ("test_laplace_start",),
    ),
    Mutant(
        "start: the first mode is enough",
        "guides/laplace.py",
        "STARTS = 4",
        "STARTS = 1",
        ("test_laplace_start",),
    ),
    Mutant(
        "concave: tangents of another slope",
        "guides/scouts.py",
        "above = values - values.unsqueeze(1) - along",
        "above = values - values.unsqueeze(1) + along",
        ("test_laplace_start",),
    ),
    Mutant(
        "concave: tangents are not looked at",
        "guides/scouts.py",
        "(above < -DECREASE - rounding).any() | unknown",
        "unknown",
        ("test_laplace_start",),
    ),
    Mutant(
        "concave: the root of a rounding is forgiven",
        "guides/scouts.py",
        "torch.finfo(x.dtype).eps * size",
        "torch.finfo(x.dtype).eps ** 0.5 * size",
        ("test_laplace_start",),
    ),
    Mutant(
        "chains: noise of one step moves the next by no transition",
        "hierarchy/runs.py",
        "before = torch.cat([0.0 * one[-1:], one[:-1]])",
        "before = 0.0 * one",
        ("test_blocks",),
    ),
    Mutant(
        "start: the lowest of the finalists",
        "guides/laplace.py",
        "best[elbos.index(max(elbos))]",
        "best[elbos.index(min(elbos))]",
        ("test_laplace_start",),
    ),
    Mutant(
        "start: a minibatch is searched unasked",
        "guides/search.py",
        '(part or len(s["value"]) >= s["fn"].size)',
        "True",
        ("test_laplace_start",),
    ),
    Mutant(
        "mean field matched to marginal variances",
        "families/mean_field.py",
        "-0.5 * precision.diagonal().log()",
        "0.5 * torch.linalg.inv(precision).diagonal().log()",
        ("test_laplace_start",),
    ),
    Mutant(
        "principal factors: eigenvalues not lowered",
        "linalg/spectral.py",
        "(values[:rank] - 1.0).clamp_min(0.0)",
        "values[:rank].clamp_min(0.0)",
        ("test_laplace_start",),
    ),
)

FAMILIES = (
    Mutant(
        "triangles: retraction's second order 1 for 1/2",
        "linalg/stiefel.py",
        "L + La + 0.5 * tril_product(La, tangent)",
        "L + La + 1.0 * tril_product(La, tangent)",
        ("test_retractions", "test_families", "test_matrix_normal"),
    ),
    Mutant(
        "full rank: Fisher matrix without the 2 of the diagonal",
        "families/full_rank.py",
        "torch.diagonal_scatter(M, 0.5 * M.diagonal())",
        "torch.diagonal_scatter(M, 1.0 * M.diagonal())",
        ("test_one_step", "test_families"),
    ),
    Mutant(
        "full rank: curvature without the identity",
        "families/full_rank.py",
        "(0.5 * (whitened + whitened.mT) - identity).tril()",
        "(0.5 * (whitened + whitened.mT) + identity).tril()",
        ("test_von",),
    ),
    Mutant(
        "mean field: Fisher information 1 of a log sd",
        "families/mean_field.py",
        '"log_scale": 0.5 * gradient["log_scale"]',
        '"log_scale": gradient["log_scale"]',
        ("test_one_step", "test_families"),
    ),
    Mutant(
        "mean field: safe step's second order 1 for 1/2",
        "families/mean_field.py",
        "torch.addcmul(change, change, change, value=0.5)",
        "torch.addcmul(change, change, change, value=1.0)",
        ("test_von",),
    ),
    Mutant(
        "mean field: improved retraction's second order 1 for 1/2",
        "families/mean_field.py",
        "torch.log1p(a + 0.5 * a.square())",
        "torch.log1p(a + a.square())",
        ("test_retractions", "test_families"),
    ),
    Mutant(
        "mean field: log of a precision moves the log sd whole",
        "families/mean_field.py",
        "torch.add(log_scale, log_ratio, alpha=-0.5)",
        "torch.add(log_scale, log_ratio, alpha=-1.0)",
        ("test_von",),
    ),
    Mutant(
        "factors: solution's cross term 1 for 1/2",
        "families/factor_base.py",
        "K = torch.addmm(H, H_R, E_inverse, alpha=-0.5)",
        "K = torch.addmm(H, H_R, E_inverse, alpha=-1.0)",
        ("test_families",),
    ),
    Mutant(
        "factors: twice the row sums of G o B+ once",
        "families/factor_base.py",
        "torch.addmm(G, H, B_plus, beta=-2.0)",
        "torch.addmm(G, H, B_plus, beta=-1.0)",
        ("test_families",),
    ),
    Mutant(
        "factors: long moves not bounded",
        "families/factor_base.py",
        "U * (self.c * (1.0 + second).rsqrt())",
        "U * self.c",
        ("test_retractions", "test_families"),
    ),
    Mutant(
        "factor: gradient of the factor twice",
        "families/factor.py",
        "rows = 0.5 * torch.addmm((w @ B).mT @ g, (g @ B).mT, w)",
        "rows = torch.addmm((w @ B).mT @ g, (g @ B).mT, w)",
        ("test_families",),
    ),
    Mutant(
        "factor: score without the leverage",
        "families/factor_base.py",
        "(y * factors.c).square() - (1.0 - factors.leverage)",
        "(y * factors.c).square() - (1.0 + factors.leverage)",
        ("test_families",),
    ),
    Mutant(
        "factor precision: sign of the gradient of U",
        "families/factor.py",
        "rows = -0.5 * torch.addmm((h @ U).mT @ x, (x @ U).mT, h)",
        "rows = 0.5 * torch.addmm((h @ U).mT @ x, (x @ U).mT, h)",
        ("test_families",),
    ),
    Mutant(
        "factor precision: log s moves by half",
        "families/factor_base.py",
        "clamp_exponent(params[name] + self.power * change)",
        "clamp_exponent(params[name] + change)",
        ("test_families",),
    ),
    Mutant(
        "factor precision: curvature without the leverage",
        "families/factor.py",
        '"log_precision": 1.0 - factors.leverage - diagonal,',
        '"log_precision": 1.0 - diagonal,',
        ("test_factor_precision",),
    ),
    Mutant(
        "factor precision: no correction of the diagonal",
        "families/factor.py",
        "(1.0 - rate) * s + rate * delta + correction",
        "(1.0 - rate) * s + rate * delta",
        ("test_slang",),
    ),
    Mutant(
        "gamma: rate moves with the mean",
        "families/exponential.py",
        'rate = w - step * velocity["log_mean"]',
        'rate = w + step * velocity["log_mean"]',
        ("test_exponential_families",),
    ),
    Mutant(
        "gamma: variance without the trigamma's excess",
        "families/exponential.py",
        "return (a + trigamma_excess(a)).sqrt() / a",
        "return (a - trigamma_excess(a)).sqrt() / a",
        ("test_exponential_families",),
    ),
    Mutant(
        "gamma: sign of Stirling's rest in the entropy",
        "families/exponential.py",
        "(a * digamma_gap(a) - 0.5 * (log_a - LOG_2PI) + stirling(a)).sum()",
        "(a * digamma_gap(a) - 0.5 * (log_a - LOG_2PI) - stirling(a)).sum()",
        ("test_exponential_families",),
    ),
    Mutant(
        "Dirichlet: frame shrinks where it stretches",
        "families/exponential.py",
        "(1.0 / root - 1.0)",
        "(root - 1.0)",
        ("test_exponential_families",),
    ),
    Mutant(
        "Dirichlet: entropy's constant added",
        "families/exponential.py",
        "(alpha * self._gap(alpha)).sum() - constant.sum()",
        "(alpha * self._gap(alpha)).sum() + constant.sum()",
        ("test_exponential_families",),
    ),
    Mutant(
        "matrix normal: gauge drifts",
        "families/matrix_normal.py",
        '"row_tril": t * A,',
        '"row_tril": A / t,',
        ("test_matrix_normal",),
    ),
    Mutant(
        "matrix normal: cross block of the natural gradient twice",
        "families/matrix_normal.py",
        "s = (a + b) / (2.0 * (n + m) ** 2)",
        "s = (a + b) / (1.0 * (n + m) ** 2)",
        ("test_matrix_normal",),
    ),
    Mutant(
        "mean field: natural step of half the length",
        "families/mean_field.py",
        "torch.log1p(-2.0 * shrink * change)",
        "torch.log1p(-shrink * change)",
        ("test_one_step",),
    ),
    Mutant(
        "mean field: KL without the -1",
        "families/mean_field.py",
        "(2.0 * log_ratio).exp() - 1.0 - 2.0 * log_ratio",
        "(2.0 * log_ratio).exp() - 2.0 * log_ratio",
        ("test_families",),
    ),
    Mutant(
        "factors: corner of the root of M without its identity",
        "families/factor_base.py",
        "corner = self.identity + self.C_chol",
        "corner = self.C_chol",
        ("test_families",),
    ),
    Mutant(
        "full rank: draws' gradient not symmetrised by halves",
        "families/full_rank.py",
        "(0.5 * left.mT @ right).tril()",
        "(left.mT @ right).tril()",
        ("test_one_step", "test_families"),
    ),
)

OPTIM = (
    Mutant(
        "VON: no bias correction",
        "optim/von.py",
        "unbiased = m / (1.0 - self.momentum ** (k + 1.0))",
        "unbiased = m",
        ("test_von",),
    ),
    Mutant(
        "VON: mean moves uphill",
        "optim/von.py",
        'still["loc"] - move',
        'still["loc"] + move',
        ("test_von",),
    ),
    Mutant(
        "VON: radius in nats where it is in sds",
        "optim/von.py",
        'self.trust_radius * params["loc"].shape[-1] ** 0.5',
        "self.trust_radius",
        ("test_trust_region", "test_von"),
    ),
    Mutant(
        "IVON: bias correction a step late",
        "optim/vogn.py",
        '(state["step"] + 1.0)',
        '(state["step"] + 2.0)',
        ("test_ivon",),
    ),
    Mutant(
        "SPRING: the past explains with the wrong sign",
        "optim/spring.py",
        "_centred(residuals) / count**0.5 - predicted",
        "_centred(residuals) / count**0.5 + predicted",
        ("test_spring",),
    ),
    Mutant(
        "SPRING: ridge of the sum of the diagonal",
        "optim/spring.py",
        "kernel.diagonal().mean()",
        "kernel.diagonal().sum()",
        ("test_spring",),
    ),
    Mutant(
        "SPRING: length without the past",
        "optim/spring.py",
        "torch.linalg.vector_norm(predicted + kernel @ x)",
        "torch.linalg.vector_norm(kernel @ x)",
        ("test_spring",),
    ),
    Mutant(
        "SPRING: distance to the average backwards",
        "optim/spring.py",
        "self.family.log_prob(params, draws) - self.family.log_prob(average, draws)",
        "self.family.log_prob(average, draws) - self.family.log_prob(params, draws)",
        ("test_spring",),
    ),
    Mutant(
        "IFVB: dense estimate starts with the weight of one score",
        "optim/ifvb_rule.py",
        "weight = max(weight, float(len(diagonal)))",
        "weight = max(weight, 1.0)",
        ("test_fisher_guesses", "test_ifvb_rule"),
    ),
    Mutant(
        "noisy K-FAC: first statistics count half",
        "optim/noisy_kfac.py",
        "torch.maximum(b, 1.0 / (count + 1.0))",
        "torch.maximum(b, 1.0 / (count + 2.0))",
        ("test_noisy_kfac",),
    ),
    Mutant(
        "noisy K-FAC: pi upside down",
        "optim/noisy_kfac.py",
        "by_rows, by_columns = root_rows / root_columns, root_columns / root_rows",
        "by_columns, by_rows = root_rows / root_columns, root_columns / root_rows",
        ("test_noisy_kfac",),
    ),
    Mutant(
        "Vadam: bias correction a step late",
        "optim/vogn.py",
        "rate_at(self.curvature_lr, k)) ** (k + 1.0)",
        "rate_at(self.curvature_lr, k)) ** (k + 2.0)",
        ("test_von",),
    ),
)

FRAMES = (
    Mutant(
        "frames: tangents of a precision's location as of a covariance's",
        "optim/frames.py",
        "torch.linalg.solve_triangular(L.mT, t, upper=True) if self.inverse else L @ t",
        "L @ t",
        ("test_frames",),
    ),
    Mutant(
        "frames: velocities of the diagonal forget the map behind it",
        "optim/frames.py",
        "velocity.diagonal(dim1=-2, dim2=-1) / self._slope(x)",
        "velocity.diagonal(dim1=-2, dim2=-1)",
        ("test_frames",),
    ),
    Mutant(
        "frames: translation from the right",
        "linalg/stiefel.py",
        "La = tril_product(L, tangent)",
        "La = tril_product(tangent, L)",
        ("test_frames",),
    ),
    Mutant(
        "frames: retraction of the first order",
        "linalg/stiefel.py",
        "return L + La + 0.5 * tril_product(La, tangent)",
        "return L + La",
        ("test_frames",),
    ),
    Mutant(
        "frames: products with F pulled at the wrong place",
        "optim/blocks.py",
        "velocity = pack(self.push(params, self.unpack(v, params)))",
        "velocity = pack(self.unpack(v, params))",
        ("test_frames",),
    ),
)

FISHER = (
    Mutant(
        "low rank: sign in the debiasing",
        "fisher/low_rank.py",
        "b = x + 1.0 - ratio",
        "b = x + 1.0 + ratio",
        ("test_spiked_covariance", "test_low_rank"),
    ),
    Mutant(
        "low rank: the smaller root of the debiasing",
        "fisher/low_rank.py",
        "(b + (b.square() - 4.0 * x).clamp_min(0.0).sqrt())",
        "(b - (b.square() - 4.0 * x).clamp_min(0.0).sqrt())",
        ("test_spiked_covariance", "test_low_rank"),
    ),
    Mutant(
        "low rank: edge of the noise at 1 + D / n",
        "fisher/low_rank.py",
        "edge = (1.0 + ratio.sqrt()).square()",
        "edge = 1.0 + ratio",
        ("test_spiked_covariance", "test_low_rank"),
    ),
    Mutant(
        "low rank: the first guess has no share",
        "fisher/low_rank.py",
        'share = state["total"] / state["diagonal_total"].clamp_min(tiny)',
        "share = torch.ones_like(total)",
        ("test_fisher_guesses", "test_low_rank"),
    ),
    Mutant(
        "low rank: rare coordinates believed at once",
        "fisher/low_rank.py",
        'believed = torch.lerp(state["guess"], diagonal, trust(times))',
        'believed = torch.where(times > 0, diagonal, state["guess"])',
        ("test_fisher_guesses", "test_low_rank"),
    ),
    Mutant(
        "low rank: the first guess in the trace of the scores",
        "fisher/low_rank.py",
        'alone = (state["diagonal"] * state["diagonal_total"] - state["guess"] * guessed) / total',
        'alone = state["diagonal"]',
        ("test_fisher_guesses", "test_low_rank"),
    ),
    Mutant(
        "first guess: rare coordinates believed at once",
        "fisher/inverse.py",
        "return torch.lerp(mean, square, trust(seen))",
        "return torch.where(seen > 0, square, mean)",
        ("test_fisher_guesses",),
    ),
    Mutant(
        "first guess: mean of a parameter over unseen entries too",
        "fisher/inverse.py",
        "own.sum() / count.sum().clamp_min(1)",
        "own.mean()",
        ("test_fisher_guesses",),
    ),
    Mutant(
        "trust of few scores linear",
        "fisher/inverse.py",
        "return square / (square + FEW**2)",
        "return times_seen / (times_seen + 1.0)",
        ("test_fisher_guesses",),
    ),
    Mutant(
        "dense: sign in Woodbury",
        "fisher/inverse.py",
        "device=rows.device) + rows @ b.mT",
        "device=rows.device) - rows @ b.mT",
        ("test_inversion_free",),
    ),
    Mutant(
        "window: sign in Woodbury",
        "fisher/inverse.py",
        "(g - rows.mT @ (root * weight) / ridge) / ridge",
        "(g + rows.mT @ (root * weight) / ridge) / ridge",
        ("test_window",),
    ),
    Mutant(
        "plain coordinates move backwards",
        "optim/blocks.py",
        "retract(params, n, step * tangent[n])",
        "retract(params, n, -step * tangent[n])",
        ("test_ifvb_rule",),
    ),
    Mutant(
        "low rank: growing weights not rooted",
        "fisher/low_rank.py",
        "torch.mul(rows, weight**0.5, out=",
        "torch.mul(rows, weight, out=",
        ("test_low_rank",),
    ),
    Mutant(
        "window: ridge of the mean over the window",
        "fisher/inverse.py",
        "gram.diagonal().sum() / len(g)",
        "gram.diagonal().mean()",
        ("test_window",),
    ),
    Mutant(
        "scores of subsampled plates times N / n",
        "fisher/scores.py",
        "scale_and_mask(log_prob, minibatch_scale(site) ** 0.5,",
        "scale_and_mask(log_prob, minibatch_scale(site),",
        ("test_scores",),
    ),
)

OTHER_GUIDES = (
    Mutant(
        "products: sites of subsampled plates count once",
        "fisher/products.py",
        "scale_and_mask(divergence, minibatch_scale(site), site",
        "scale_and_mask(divergence, 1.0, site",
        ("test_products",),
    ),
    Mutant(
        "products: draws of parents move with the parameters",
        "fisher/scores.py",
        "_Fixed() if fixed else nullcontext()",
        "nullcontext()",
        ("test_products",),
    ),
    Mutant(
        "products: a distribution held fixed shares its memory with the parameters",
        "fisher/products.py",
        "vars(new)[name] = value.detach().clone()",
        "vars(new)[name] = value.detach()",
        ("test_products",),
    ),
    Mutant(
        "divergence from ratios without its first order",
        "fisher/products.py",
        "(torch.special.expm1(log_ratio) - log_ratio)",
        "(0.0 * log_ratio - log_ratio)",
        ("test_products",),
    ),
    Mutant(
        "conjugate gradients: directions that are not conjugate",
        "linalg/positive.py",
        "energy / before.clamp_min(tiny) * p",
        "before / energy.clamp_min(tiny) * p",
        ("test_products",),
    ),
    Mutant(
        "conjugate gradients: one unit for all parameters",
        "fisher/conjugate.py",
        "for part in squares])",
        "for part in [torch.cat(squares)]])",
        ("test_products",),
    ),
    Mutant(
        "held against the KL: the bound grows as t",
        "optim/divergence.py",
        "(t.square() * bound + NONE)",
        "(t * bound + NONE)",
        ("test_products",),
    ),
    Mutant(
        "steady draws: S in place of S - 1",
        "distributions/steady.py",
        "(n / (n - 1)) ** 0.5",
        "1.0",
        ("test_steady",),
    ),
    Mutant(
        "steady draws keep the score",
        "distributions/steady.py",
        "- (at_fixed - at_fixed.detach())",
        "",
        ("test_steady",),
    ),
)

CURVATURE = (
    Mutant(
        "rows by their weights, not the roots",
        "curvature/derivatives.py",
        "return w.sqrt() * torch.cat([block(part) for part in parts], 1)",
        "return w * torch.cat([block(part) for part in parts], 1)",
        ("test_per_example",),
    ),
    Mutant(
        "squared gradient not divided by the count",
        "curvature/estimators.py",
        '"diagonal": squares / count + rest',
        '"diagonal": squares + rest',
        ("test_curvature",),
    ),
    Mutant(
        "rows of several draws divided by S",
        "curvature/estimators.py",
        "return rows.flatten(0, 1) / len(rows) ** 0.5",
        "return rows.flatten(0, 1) / len(rows)",
        ("test_curvature",),
    ),
    Mutant(
        "sign of the rest's curvature",
        "curvature/estimators.py",
        "return {drawn.form: data + rest}",
        "return {drawn.form: data - rest}",
        ("test_curvature",),
    ),
    Mutant(
        "taps: squares of averages over the draws",
        "curvature/taps/taps.py",
        "return num_particles / scale if",
        "return 1.0 / scale if",
        ("test_layer_taps",),
    ),
    Mutant(
        "taps: several uses of an embedding squared apart",
        "curvature/taps/layers.py",
        "squares = (same @ b).square() / same.sum(-1, keepdim=True)",
        "squares = b.square()",
        ("test_layer_taps",),
    ),
    Mutant(
        "taps: several uses of a site squared after the sum over data",
        "curvature/taps/taps.py",
        "squares.append(gradient.square_().sum(0))",
        "squares.append(gradient.sum(0).square_())",
        ("test_layer_taps",),
    ),
    Mutant(
        "taps: inputs shared by all draws counted once",
        "curvature/taps/kronecker.py",
        "new = a.mT @ a * (S // len(x)), b",
        "new = a.mT @ a, b",
        ("test_kronecker",),
    ),
    Mutant(
        "Hessians not symmetrised",
        "curvature/derivatives.py",
        "return H if diagonal else 0.5 * (H + H.mT)",
        "return H",
        ("test_curvature",),
        equivalent="second derivatives commute, so H = H' but for rounding",
    ),
)

SITES = (
    Mutant(
        "CVI: sign of H m in the targets",
        "sites/loss.py",
        "return gradient - matvec(hessian, mean), -hessian",
        "return gradient + matvec(hessian, mean), -hessian",
        ("test_cvi",),
    ),
    Mutant(
        "CVI: a datum that comes twice moves twice",
        "sites/loss.py",
        "moves = finite & (last[index] == order)",
        "moves = finite",
        ("test_cvi_minibatches",),
    ),
    Mutant(
        "pairing without the 1/2 of the second moments",
        "sites/cvi.py",
        "(nu * m).sum() - 0.5 * (Lambda * M).sum()",
        "(nu * m).sum() - (Lambda * M).sum()",
        ("test_secant", "test_cvi"),
    ),
    Mutant(
        "secant: sign of the new slope",
        "sites/cvi.py",
        '(along / memory["gain"] - slope)',
        '(along / memory["gain"] + slope)',
        ("test_secant", "test_cvi"),
    ),
    Mutant(
        "secant: a step taken back keeps its gain",
        "sites/cvi.py",
        '"gain": share * memory["gain"]',
        '"gain": memory["gain"]',
        ("test_secant", "test_cvi"),
    ),
    Mutant(
        "cavity: sign in the pull",
        "sites/leave_one_out.py",
        "pull = g + matvec(Lambda, move)",
        "pull = g - matvec(Lambda, move)",
        ("test_leave_one_out",),
    ),
    Mutant(
        "cavity: sign of the log determinant in the KL",
        "sites/leave_one_out.py",
        "- k + log_det + square",
        "- k - log_det + square",
        ("test_leave_one_out",),
    ),
    Mutant(
        "leave one out: points without their Jacobian",
        "sites/leave_one_out.py",
        "0.5 * (x.square().sum(-1, keepdim=True) - v.square().sum(-1)) + log_det",
        "0.5 * (x.square().sum(-1, keepdim=True) - v.square().sum(-1))",
        ("test_leave_one_out",),
    ),
    Mutant(
        "initial sites: targets not moved to the mean of q",
        "sites/expectation.py",
        "gradient = e.gradient + matvec(Lambda, matvec(roots[name], best[name].x))",
        "gradient = e.gradient",
        ("test_initial_sites", "test_cvi_hard_starts"),
    ),
    Mutant(
        "initial sites: sign of the log determinant in the KL",
        "sites/expectation.py",
        "self.x.square().sum(-1)) - self.log_det",
        "self.x.square().sum(-1)) + self.log_det",
        ("test_initial_sites", "test_cvi_hard_starts"),
    ),
    Mutant(
        "initial sites: spread the reciprocal of what it should be",
        "sites/expectation.py",
        "half = -0.5 * share.unsqueeze(-1) * self.r.log()",
        "half = 0.5 * share.unsqueeze(-1) * self.r.log()",
        ("test_initial_sites", "test_cvi_hard_starts"),
    ),
    Mutant(
        "expectations: Hessians of the transposed root",
        "sites/expectation.py",
        "L.mT, moments.mT, upper=True",
        "L.mT, moments, upper=True",
        ("test_site_expectations",),
    ),
    Mutant(
        "CVI: sign of the linear part of the KL of a step",
        "sites/cvi.py",
        "kl = step.log_normalizer - before - along",
        "kl = step.log_normalizer - before + along",
        ("test_cvi",),
    ),
    Mutant(
        "proper step: evidence of the whole step after a share of it",
        "sites/algebra.py",
        "evidence = choose(share == 1.0, after, before.plus(step, share))",
        "evidence = after",
        ("test_proper_step",),
    ),
    Mutant(
        "leave one out: effective parameters negative",
        "sites/leave_one_out.py",
        "with_it - without",
        "without - with_it",
        ("test_leave_one_out",),
    ),
)

DIAGNOSTICS = (
    Mutant(
        "k-hat: threshold 1 - 1 / ln S",
        "diagnostics/khat.py",
        "1 - 1 / np.log10(len(x))",
        "1 - 1 / np.log(len(x))",
        ("test_khat",),
    ),
    Mutant(
        "k-hat: size of the sample from plain weights",
        "diagnostics/khat.py",
        "np.exp(2 * normalised)",
        "np.exp(normalised)",
        ("test_khat",),
    ),
    Mutant(
        "k-hat: KL with the wrong sign of log S",
        "diagnostics/khat.py",
        "-np.mean(self.log_weights) - np.log(len(self.log_weights))",
        "-np.mean(self.log_weights) + np.log(len(self.log_weights))",
        ("test_decisions", "test_khat", "test_verdict"),
    ),
    Mutant(
        "verdict: KL of Gaussians a mean apart without its 1/2",
        "diagnostics/khat.py",
        "SMALL_KL = 0.5 * COARSE_MEAN**2",
        "SMALL_KL = COARSE_MEAN**2",
        ("test_decisions", "test_verdict"),
    ),
    Mutant(
        "verdict: a change of 30 % is 0.3 in the log",
        "diagnostics/shifts.py",
        "COARSE_SD = float(np.log(1.3))",
        "COARSE_SD = 0.3",
        ("test_decisions", "test_verdict"),
    ),
    Mutant(
        "verdict: few draws correct a fit that has not ended",
        "diagnostics/khat.py",
        "(share >= FEWEST and self.ended)",
        "(share >= FEWEST)",
        ("test_decisions", "test_verdict"),
    ),
    Mutant(
        "shifts: an end of the raw draws alone",
        "diagnostics/shifts.py",
        "moved.append(new - old)",
        "moved.append(new - new)",
        ("../statistical/test_ends",),
    ),
    Mutant(
        "shifts: the noise of raw draws is not that of the same under weights",
        "diagnostics/shifts.py",
        "(part - own) ** 2",
        "part**2 + own**2",
        ("../statistical/test_ends",),
    ),
    Mutant(
        "shifts: noise of an end for none",
        "diagnostics/shifts.py",
        "abs(self.ends) + more * self.ends_error",
        "abs(self.ends)",
        ("../statistical/test_ends",),
    ),
    Mutant(
        "verdict: an end that is off is taken",
        "diagnostics/moved.py",
        "return bool(good.all()) and self.end() <= COARSE_END",
        "return bool(good.all())",
        ("../statistical/test_ends",),
    ),
    Mutant(
        "triangular: a solve for its transpose in the gradient",
        "linalg/triangular.py",
        "u = Solve.apply(L, grads[0], not ctx.transposed)",
        "u = Solve.apply(L, grads[0], ctx.transposed)",
        ("test_triangular",),
    ),
    Mutant(
        "sites: as many points where the likelihood has kinks",
        "sites/expectation.py",
        "counts[name] <<= moves",
        "counts[name] <<= 0",
        ("test_site_expectations",),
    ),
    Mutant(
        "advice: sites for any number of latent variables",
        "fitting/structure.py",
        "return self.whole and d > FEW and",
        "return self.whole and",
        ("../contract/test_wide",),
    ),
    Mutant(
        "shifts: log of a variance for that of a sd",
        "diagnostics/shifts.py",
        "0.5 * np.log(np.where(fixed, 1.0, variance_w / variance))",
        "np.log(np.where(fixed, 1.0, variance_w / variance))",
        ("test_verdict",),
    ),
    Mutant(
        "shifts: standard error of a variance for that of a log sd",
        "diagnostics/shifts.py",
        "0.5 * np.sqrt((ratio**2).sum(0))",
        "np.sqrt((ratio**2).sum(0))",
        ("test_verdict",),
    ),
    Mutant(
        "shifts: one standard error in the largest mean",
        "diagnostics/shifts.py",
        "abs(self.mean) + more * self.mean_error",
        "abs(self.mean) + 0.5 * more * self.mean_error",
        ("test_decisions", "test_verdict"),
    ),
    Mutant(
        "slopes: of u^2 for that of u^2 / 2",
        "diagnostics/weights.py",
        '("sd", (u * u - 1) / 2)',
        '("sd", u * u - 1)',
        ("test_verdict",),
    ),
    Mutant(
        "Pareto tail: quantiles at i / M",
        "diagnostics/weights.py",
        "(np.arange(len(tail.at)) + 0.5) / len(tail.at)",
        "np.arange(len(tail.at)) / len(tail.at)",
        ("test_psis",),
    ),
    Mutant(
        "Pareto tail: shape not pulled to 1/2",
        "diagnostics/weights.py",
        "shape = (n * k_hat + PRIOR_DRAWS * PRIOR_SHAPE) / (n + PRIOR_DRAWS)",
        "shape = k_hat",
        ("test_khat",),
    ),
    Mutant(
        "missed modes: the chance of luck added",
        "diagnostics/weights.py",
        "by_markov = prior.log - SURPRISE - guide.log",
        "by_markov = prior.log + SURPRISE - guide.log",
        ("test_verdict",),
    ),
)

PROCESSES = (
    Mutant(
        "processes: the terms of a shard count once",
        "distributed/shards.py",
        'msg["scale"] = msg["scale"] * self.factor',
        'msg["scale"] = msg["scale"] * 1',
        ("../contract/test_distributed",),
    ),
    Mutant(
        "processes: units of ranks, whose log q counts once",
        "distributed/svi.py",
        "guide.share, guide.apart = float(self.program.factor), rank() * APART",
        "guide.share, guide.apart = 1.0, rank() * APART",
        ("../contract/test_distributed",),
    ),
    Mutant(
        "processes: rows of all ranks as if they were of one",
        "distributed/statistics.py",
        "(world_size() ** 0.5 if name == ROWS else world_size())",
        "world_size()",
        ("../contract/test_distributed",),
    ),
    Mutant(
        "processes: parameters of rank 0 are not taken",
        "distributed/svi.py",
        "take_from_first([v.detach() for v in tensors.values()])",
        "take_from_first([v.detach().clone() for v in tensors.values()])",
        ("../contract/test_distributed",),
    ),
    Mutant(
        "processes: the secant sees the sites of one rank",
        "sites/cvi.py",
        "    return ranks.sum(total)[0]",
        "    return total",
        ("../contract/test_distributed",),
    ),
    Mutant(
        "processes: weights of a fit are those of one rank's data",
        "distributed/shards.py",
        "return x if is_alone() else mean_over_ranks(x.clone())",
        "return x",
        ("../contract/test_distributed",),
    ),
)

FRONTIER = (
    Mutant(
        "mixture: weights as if they need not sum to one",
        "families/mixture.py",
        'return {"logits": pi * (u - (pi * u).sum())}',
        'return {"logits": pi * u}',
        ("test_mixture", "../contract/test_mixture_guide"),
    ),
    Mutant(
        "mixture: the sd without that between components",
        "families/mixture.py",
        "return (self.probs(params) @ (own.square() + away.square())).sqrt()",
        "return (self.probs(params) @ own.square()).sqrt()",
        ("test_mixture", "../contract/test_mixture_guide"),
    ),
    Mutant(
        "mixture: components step on weighted bounds",
        "optim/mixture.py",
        "bounds = by_component(1.0 / pi, self.family.own(grads))",
        "bounds = self.family.own(grads)",
        ("test_mixture", "../contract/test_mixture_guide"),
    ),
    Mutant(
        "mixture: twins have no divergence one way",
        "optim/mixture.py",
        "twins = (divergence + divergence.mT < TWINS).triu(1)",
        "twins = (divergence < TWINS).triu(1)",
        ("test_mixture", "../contract/test_mixture_guide"),
    ),
    Mutant(
        "mixture: a component moves with the weight it had",
        "optim/mixture.py",
        'weight = log_p[0] - elbo - self.family.component.log_prob(of_owner, of_owner["loc"])',
        "weight = log_p[0] - elbo",
        ("test_mixture", "../contract/test_mixture_guide"),
    ),
    Mutant(
        "metric Gaussian: draws without the noise of the data",
        "metric/family.py",
        "return self.solve(own + self.pull(data))",
        "return self.solve(own)",
        ("test_metric",),
    ),
    Mutant(
        "metric Gaussian: log det of half of M",
        "metric/family.py",
        "value = 2.0 * self.root.diagonal().log().sum()",
        "value = self.root.diagonal().log().sum()",
        ("test_metric",),
    ),
    Mutant(
        "metric Gaussian: the prior left out of M",
        "metric/family.py",
        "return V + self._products(V, lambda v: self._pull(self._push(v)))",
        "return self._products(V, lambda v: self._pull(self._push(v)))",
        ("test_metric",),
    ),
    Mutant(
        "minibatches: each counts as the whole",
        "diagnostics/draws.py",
        "log_p = log_p + share * part[0]",
        "log_p = log_p + part[0]",
        ("../contract/test_over_batches",),
    ),
    Mutant(
        "minibatches: shares need not add up",
        "diagnostics/over_batches.py",
        "if abs(total - 1.0) > ROUNDING:",
        "if total > 1e9:",
        ("../contract/test_over_batches",),
    ),
)

MUTANTS = (
    *RULES,
    *STEPS,
    *FAMILIES,
    *OPTIM,
    *FRAMES,
    *FISHER,
    *OTHER_GUIDES,
    *CURVATURE,
    *SITES,
    *DIAGNOSTICS,
    *PROCESSES,
    *FRONTIER,
)


def checkout(target: Path) -> None:
    """Copy what git knows of, and new files that it does not ignore, as they stand."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def mutated(source: str, mutant: Mutant) -> str:
    found = source.count(mutant.old)
    if found != 1:
        raise SystemExit(
            f"{mutant.path} has {found} times what {mutant.name!r} replaces, {mutant.old!r}; "
            "it must be there exactly once."
        )
    return source.replace(mutant.old, mutant.new)


def run_tests(copy: Path, files: list[str], log: Path) -> None:
    """In a process of its own: pytest on the copy.  Its exit status is that of the process."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.dont_write_bytecode = True  # a mutant of the same length would be taken for the original
    os.chdir(copy)
    sys.path.insert(0, str(copy))

    import pytest

    import pyro_ngvi

    if not Path(pyro_ngvi.__file__).is_relative_to(copy):
        print(f"The tests would see {pyro_ngvi.__file__}, which is not the copy.")
        os._exit(pytest.ExitCode.INTERNAL_ERROR)
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={copy}"]
    code = pytest.main([*options, *files])
    sys.stdout.flush()
    os._exit(int(code))


def outcome(copy: Path, files: list[str], log: Path, timeout: float) -> int | None:
    """The exit status of pytest, or ``None`` when it took too long."""
    process = get_context("fork").Process(target=run_tests, args=(copy, files, log))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def culprit(log: Path) -> str:
    """The first test that failed."""
    lines = (line for line in log.read_text().splitlines() if line.startswith("FAILED "))
    return next(lines, "FAILED ").removeprefix("FAILED ").split(" - ")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="mutants with this in their name"
    )
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds a mutant")
    parser.add_argument("--unchecked", action="store_true", help="do not run the sound code first")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if arguments.only in m.name]
    if not chosen:
        parser.error(f"No mutant has {arguments.only!r} in its name.")

    os.environ |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    # what every process would import, without this package
    import pyro.infer.autoguide  # noqa: F401
    import pytest  # noqa: F401
    import scipy.special  # noqa: F401

    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copy, log = Path(directory).resolve() / "checkout", Path(directory).resolve() / "log"
        checkout(copy)
        changed = {m: mutated((copy / PACKAGE / m.path).read_text(), m) for m in chosen}
        if not arguments.unchecked:
            files = sorted({name for m in chosen for name in m.files})
            if outcome(copy, files, log, len(files) * arguments.timeout) != PASSED:
                raise SystemExit(f"The tests fail without a mutant:\n{log.read_text()[-3000:]}")
            print(f"{len(files)} test files pass without a mutant", flush=True)
        for mutant, text in changed.items():
            path = copy / PACKAGE / mutant.path
            sound = path.read_text()
            path.write_text(text)
            start = time.perf_counter()
            code = outcome(copy, mutant.files, log, arguments.timeout)
            seconds = time.perf_counter() - start
            path.write_text(sound)
            if code not in (PASSED, FAILED, None):
                raise SystemExit(f"{mutant.name!r} broke the run:\n{log.read_text()[-3000:]}")
            by = culprit(log) if code == FAILED else "time ran out"
            word = "killed"
            if code == PASSED:
                word, by = "SURVIVED", ", ".join(mutant.tests)
            if mutant.equivalent:
                word = "equivalent" if code == PASSED else "NOT EQUIVALENT"
                by = mutant.equivalent if code == PASSED else by
            counts[word] += 1
            print(f"{word:10} {seconds:4.0f} s  {mutant.path}: {mutant.name} ({by})", flush=True)
    print(f"{len(chosen)} mutants: " + ", ".join(f"{n} {word}" for word, n in counts.items()))
    return 1 if counts["SURVIVED"] + counts["NOT EQUIVALENT"] else 0


if __name__ == "__main__":
    sys.exit(main())
