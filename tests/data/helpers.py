"""What the tests of image data share."""

import io

import numpy as np
import torch
from PIL import Image

from lightning_lowrank.data import TinyImageNet


def all_samples(loader):
    batches = list(loader)
    return torch.cat([images for images, _ in batches]), torch.cat([targets for _, targets in batches])


def jpeg(pixels):
    """The bytes of a JPEG file of ``(height, width[, channels])``, and the pixels that they decode to."""
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "jpeg", quality=90)
    decoded = np.asarray(Image.open(content))
    return content.getvalue(), (decoded[None].repeat(3, 0) if decoded.ndim == 2 else decoded.transpose(2, 0, 1))


def broken_png(pixels):
    """A PNG file of these pixels whose chunk of data has a wrong length, which Pillow reports as a SyntaxError."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    content = bytearray(file.getvalue())
    start = content.index(b"IDAT")
    content[start - 4 : start] = b"\0\0\0\5"
    return bytes(content)


def write_tiny_imagenet(root, test_images=30):
    """Write the archive's folder, of each class one image in colour and a grey one; return pixels and targets."""
    generator = np.random.default_rng(5)
    folder = root / "tiny-imagenet-200"
    names = [f"n{number:08d}" for number in generator.permutation(10**6)[: TinyImageNet.num_classes]]
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(names))
    pixels, targets = {"train": [], "test": []}, {"train": [], "test": []}

    def image(path, name, split, *channels):
        content, decoded = jpeg(generator.integers(0, 256, (64, 64, *channels), dtype=np.uint8))
        path.write_bytes(content)
        pixels[split].append(decoded)
        targets[split].append(sorted(names).index(name))

    for name in sorted(names):
        (folder / "train" / name / "images").mkdir(parents=True)
        (folder / "train" / name / f"{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t0\t63\t63\n")
        image(folder / "train" / name / "images" / f"{name}_0.JPEG", name, "train", 3)
        image(folder / "train" / name / "images" / f"{name}_1.JPEG", name, "train")
    annotations = ""
    for number in range(test_images):
        name = names[-number % 7]
        image(folder / "val" / "images" / f"val_{number}.JPEG", name, "test", 3)
        annotations += f"val_{number}.JPEG\t{name}\t0\t32\t44\t62\n"
    (folder / "val" / "val_annotations.txt").write_text(annotations)
    return {split: np.stack(pixels[split]) for split in pixels}, targets
