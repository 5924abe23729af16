"""Each reason code is produced by the small model that the page of codes shows for it."""

from __future__ import annotations

import pytest

from docs.code_examples import EXAMPLES
from ort_moe.reasons import REASONS
from ort_moe.rewrites import rewrite


def test_every_code_has_an_example() -> None:
    assert list(EXAMPLES) == list(REASONS), "give each code of ort_moe/reasons.py a model in docs/code_examples.py"


@pytest.mark.parametrize("slug", EXAMPLES)
def test_example_produces_its_code(slug: str) -> None:
    example = EXAMPLES[slug]
    result = rewrite(example.model(), skip=example.skip, target=example.target)
    sites = (*result.sites, *result.experts)
    findings = [*result.findings, *(finding for site in sites for finding in site.findings)]
    assert slug in [finding.reason.slug for finding in findings]


def test_codes_count_up() -> None:
    assert [reason.code for reason in REASONS.values()] == [f"OM{n:03}" for n in range(1, len(REASONS) + 1)]
