"""Families of encoders: one file and one row each."""

from fullstride.bert.model.families import bert, distilbert, modernbert, roberta
from fullstride.bert.model.families.family import Family

__all__ = ["FAMILIES", "Family"]
FAMILIES: dict[str, Family] = {
    "bert": bert.FAMILY,
    "roberta": roberta.FAMILY,
    "distilbert": distilbert.FAMILY,
    "modernbert": modernbert.FAMILY,
}
