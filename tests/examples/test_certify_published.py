"""The rule of arXiv:2601.05724 on trees: a law worked by hand, and its certificates."""

import pytest

from examples import certify_published
from specdec import certify

FAR, NEAR = (-1, 0, 1, 0, 3), (-1, 0, 0, -1)
LAW = (0.6, 0.3, 0.1)


def test_a_second_path_is_left_too_early():
    """Paths 000 and 010. 000 is accepted with 0.216. Else, a = 0.36 before its last token: 00 with
    0.784 * 0.36 * 0.4 / 0.784 = 0.144; a = 0.6: 0 with 0.64 * 0.6 * 0.4 / 0.64 = 0.24, which leaves
    (0, 3/4, 1/4); and nothing with 0.4. After 0, the two tokens 10 are accepted with 3/4 * 0.6 =
    0.45. Else, a = 0.6 * 3/4: 1 with 0.45 * 0.4 / (1 - 0.45 * 0.6). With a = 3/4 it were right.
    """
    found = certify_published.outcomes(FAR, (0, 0, 0, 1, 0), (LAW,) * 6)
    chances = {}
    for chance, path, _ in found:
        chances[path] = chances.get(path, 0) + chance
    one = 0.24 * 0.55 * 0.45 * 0.4 / (1 - 0.27)
    expected = {(0, 1, 2): 0.216, (0, 1): 0.144, (): 0.4, (0, 3, 4): 0.24 * 0.45, (0, 3): one}
    assert chances == pytest.approx({**expected, (0,): 0.24 * 0.55 - one})
    begins = chances[0, 3, 4] + chances[0, 3]
    assert begins < 0.8 * 0.6 * 0.3  # the target's probability of 01
    right = 0.24 * 0.55 * 0.75 * 0.4 / (1 - 0.45)
    assert chances[0, 3, 4] + right == pytest.approx(0.6 * 0.3)


@pytest.mark.parametrize(
    ("parents", "is_lossless"), [pytest.param(NEAR, True, marks=pytest.mark.swept), (FAR, False)]
)
def test_it_is_certified_where_no_second_path_has_two_tokens_of_its_own(parents, is_lossless):
    def of_point_masses(batches):
        return [
            problems for problems in batches if problems.is_point_mass and not problems.is_chain
        ][:1]

    options = {"sizes": ((3, 1, 12),), "num_draws": 2048, "progress": of_point_masses}
    report = certify(certify_published.HierarchicalSampler(), trees=(parents,), **options)
    assert report.passed is is_lossless, report
    assert not report.is_exact
    tokens = tuple(parents[:node].count(parent) for node, parent in enumerate(parents))
    accepted, bound = certify_published.expected(parents, tokens, LAW)
    assert (accepted == pytest.approx(bound)) is is_lossless
    assert accepted <= bound + 1e-12
