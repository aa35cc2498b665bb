"""C149: poisoned allocations show what was not written, and what was written beside."""

import pytest
import torch

from harness.poison import poisoned_allocations

FORMS = {
    "empty": lambda: torch.empty(3, 5),
    "empty of a tuple": lambda: torch.empty((3, 5), dtype=torch.bfloat16),
    "empty_like": lambda: torch.empty_like(torch.zeros(3, 5)),
    "new_empty": lambda: torch.zeros(1).new_empty(3, 5),
    "new_empty of a tuple": lambda: torch.zeros(1).new_empty((3, 5), dtype=torch.float16),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_unwritten_element_is_nan(form):
    with poisoned_allocations():
        x = FORMS[form]()
        x[:, :4] = 1
    assert x.shape == (3, 5) and x.is_contiguous()
    assert x[:, 4].isnan().all() and (x[:, :4] == 1).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool])
def test_an_unwritten_integer_is_the_largest(dtype):
    with poisoned_allocations():
        x = torch.empty(4, dtype=dtype)
    assert (x == (True if dtype == torch.bool else torch.iinfo(dtype).max)).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("beside", [-1, 15])
def test_a_write_beside_an_allocation_is_found(form, beside):
    with pytest.raises(AssertionError, match="beside an allocation of 15"), poisoned_allocations():
        x = FORMS[form]()
        x.as_strided((1,), (1,), x.storage_offset() + beside).fill_(0)


def test_allocations_are_plain_again_afterwards():
    before = torch.empty, torch.empty_like, torch.Tensor.new_empty
    with pytest.raises(KeyError), poisoned_allocations():
        raise KeyError
    assert before == (torch.empty, torch.empty_like, torch.Tensor.new_empty)
