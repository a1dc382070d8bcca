"""The API conforms to its OpenAPI schema for any input: property tests with schemathesis."""

import pytest
import schemathesis
from fake_index import FakeIndex, encoded, picture
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS

from nearfar.serve import create

PICTURES = [encoded(picture(number), kind) for number, kind in enumerate(("PNG", "JPEG", "WEBP", "GIF"))]
schemathesis.openapi.format("binary", st.sampled_from(PICTURES) | st.binary(max_size=60))

schema = schemathesis.openapi.from_dict(create(FakeIndex(30)).openapi())
# A file that is no picture fits the schema and is refused nevertheless; so is a vector of zeros.
LEFT_OUT = [check for name in ("positive_data_acceptance",) for check in CHECKS.get_by_names([name])]


@pytest.fixture(scope="module")
def address(site):
    return site(FakeIndex(30))


@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
def test_the_schema_is_kept(case, address):
    case.call_and_validate(base_url=address, excluded_checks=LEFT_OUT)
