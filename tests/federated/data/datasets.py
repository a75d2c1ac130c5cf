from torch.utils.data import Dataset


class WithAttribute(Dataset):
    """Has an attribute for its samples, which must not be read themselves."""

    def __init__(self, size, **attributes):
        self.size = size
        self.__dict__.update(attributes)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        raise AssertionError("a sample was read")
