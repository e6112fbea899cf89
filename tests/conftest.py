"""Read before any test: where Triton's kernels run has to be said before anything imports Triton, as torch may."""

import tests.triton_device  # noqa: F401
