"""What the heads of a network do, and which of them it can do without.

Looking (from `mha_fast.head_statistics`):

    classify_heads       which heads are positional, broad, or send their weight nowhere of use
    relation_accuracy    how often a head's largest weight falls where an annotator points

Weighing (from the network's output under head gates, or from gradients):

    head_importance      |sum of output times its gradient|, one number per head
    ablate_heads         what a score loses when one head goes, or all but one
    prune_greedily       remove the head that is missed least, again and again
    prune_in_order       remove heads in the order of an importance already known

Learning which to keep:

    HardConcrete         gates between 0 and 1 that are exactly 0 or 1 with some probability

Everything is NumPy, costs nothing beside the network itself, and prints as a table. A "score" is
any function of the gates that is larger when the network does better; the gates are what
`mha_fast.attention` takes as `head_mask`, one row per layer.
"""

from ._classes import HeadClasses, classify_heads
from ._gates import HardConcrete
from ._pruning import (
    Ablation,
    PruningPath,
    ablate_heads,
    head_importance,
    prune_greedily,
    prune_in_order,
)
from ._relations import RelationAccuracy, relation_accuracy

__all__ = [
    "Ablation",
    "HardConcrete",
    "HeadClasses",
    "PruningPath",
    "RelationAccuracy",
    "ablate_heads",
    "classify_heads",
    "head_importance",
    "prune_greedily",
    "prune_in_order",
    "relation_accuracy",
]
