"""Writes mobilenetv5.npz, what timm's MobileNet-V5 encoder gives for the weights and the picture of
`timm_stand_in.py`, and a digest of the published one's names and shapes:
python tests/families/golden/mobilenetv5.py, with timm installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from timm_stand_in import digest, picture, tiny_args, weights  # noqa: E402


def main() -> None:
    import timm  # type: ignore[import-not-found, unused-ignore]

    with torch.no_grad():
        network = timm.create_model("mobilenetv5_300m_enc", num_classes=0, **tiny_args())
        features = weights(network).forward_features(picture())
    with torch.device("meta"):
        published = timm.create_model("mobilenetv5_300m_enc", num_classes=0)
    np.savez_compressed(
        HERE / "mobilenetv5.npz",
        features=features.numpy(),
        published=digest({name: tuple(p.shape) for name, p in published.state_dict().items()}),
        timm=timm.__version__,
    )


if __name__ == "__main__":
    main()
