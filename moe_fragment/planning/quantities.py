"""The kinds of number that inputs of the planner are made of, read strictly: no text, no truth values, no NaN."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, Strict

Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
"""A finite number above zero."""
NonNegative = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
"""A finite number of zero or more."""
Share = Annotated[float, Strict(), Field(gt=0, le=1)]
"""Above zero, at most one."""
Whole = Annotated[int, Strict(), Field(ge=0)]
"""A whole number of zero or more."""
