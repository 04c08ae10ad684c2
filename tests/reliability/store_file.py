"""A store's container from outside (docs/format.md): where what lies, and metadata written with right checksums."""
import ctypes
import ctypes.util
import pathlib
import struct

SUPERBLOCKS, STRIDE, SUPERBLOCK_BYTES = 4, 64 << 10, 4096
BLOCK_ELEMENTS = 65536
_PAGE = 4096
_BLOB_BYTES_MAX = 64 << 10
_SUPERBLOCK_MAGIC = 0x53464E4954524D53
_LAYOUT_MAGIC = 0x4C464E4954524D53
_TABLE_HEADER = 48
# Offsets and forms of the superblock's fields.
FIELDS = {"version": (16, "I"), "readable_since": (20, "I"), "copy": (24, "I"), "phase": (28, "I"),
          "sequence": (32, "Q"), "device_index": (56, "I"), "device_count": (60, "I"), "slots": (64, "I"),
          "container_bytes": (72, "Q"), "layout_bytes": (80, "Q"), "layout_checksum": (88, "Q"),
          "committed_step": (96, "Q"), "prepared_step": (104, "Q"), "committed_table_bytes": (112, "Q"),
          "committed_table_checksum": (120, "Q"), "prepared_table_bytes": (128, "Q"),
          "prepared_table_checksum": (136, "Q"), "in_place_step": (144, "Q"), "created_seconds": (160, "Q"),
          "copied_step": (168, "Q")}
LAYOUT_FIELDS = {"bytes": (16, "Q"), "subgroup_count": (24, "Q"), "description_bytes": (32, "Q"),
                 "plane_count": (40, "I"), "state_format": (44, "I"), "gradient_spill_bytes": (48, "I"),
                 "block_elements": (52, "I"), "planes": (56, "Q")}


def xxh3(data, seed):
    library = ctypes.CDLL(ctypes.util.find_library("xxhash") or "libxxhash.so.0")
    function = library.XXH3_64bits_withSeed
    function.restype = ctypes.c_uint64
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64]
    return function(bytes(data), len(data), seed)


def _align(count):
    return -(-count // _PAGE) * _PAGE


class StoreFile:
    """A container that is whole, read into memory; save() writes it back."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.data = bytearray(self.path.read_bytes())
        self.newest = max(range(SUPERBLOCKS), key=lambda copy: self.get(copy, "sequence"))
        self.layout_at = SUPERBLOCKS * STRIDE
        self.layout_bytes = self.get(self.newest, "layout_bytes")
        subgroups, description = struct.unpack_from("<QQ", self.data, self.layout_at + 24)
        (planes,) = struct.unpack_from("<I", self.data, self.layout_at + 40)
        self.counts = [struct.unpack_from("<Q", self.data, self.layout_at + 64 + 24 * i + 16)[0]
                       for i in range(subgroups)]
        self.description = bytes(self.data[self.layout_at + self.layout_bytes - description:]
                                 [:description])
        self.layout_stride = _align(self.layout_bytes)
        self.tables_at = self.layout_at + 2 * self.layout_stride
        self.records_bytes = _TABLE_HEADER + sum(
            16 + 8 * -(-count // BLOCK_ELEMENTS) for count in self.counts) * planes
        self.table_stride = _align(self.records_bytes + _BLOB_BYTES_MAX)
        self.state_at = self.tables_at + 4 * self.table_stride

    def save(self):
        self.path.write_bytes(self.data)

    def metadata(self):
        """(kind, offset, length) of every copy of everything that is not state."""
        places = [("superblock", i * STRIDE, SUPERBLOCK_BYTES) for i in range(SUPERBLOCKS)]
        places += [("layout", self.layout_at + i * self.layout_stride, self.layout_bytes) for i in range(2)]
        return places + [("table", self.tables_at + i * self.table_stride, self.records_bytes + 64)
                         for i in range(4)]

    def get(self, copy, field):
        offset, form = FIELDS[field]
        return struct.unpack_from("<" + form, self.data, copy * STRIDE + offset)[0]

    def put(self, field, value):
        """Into all superblocks."""
        offset, form = FIELDS[field]
        for copy in range(SUPERBLOCKS):
            struct.pack_into("<" + form, self.data, copy * STRIDE + offset, value)

    def put_layout(self, field, value):
        offset, form = LAYOUT_FIELDS[field]
        for copy in range(2):
            struct.pack_into("<" + form, self.data, self.layout_at + copy * self.layout_stride + offset,
                             value)

    def put_description(self, text):
        """Another description; what lies behind it moves."""
        text = bytes(text)
        header = bytes(self.data[self.layout_at:self.layout_at + self.layout_bytes - len(self.description)])
        layout = header + text
        rest = self.data[self.tables_at:]
        padded = layout + bytes(_align(len(layout)) - len(layout))
        self.data = self.data[:self.layout_at] + padded + padded + rest
        self.layout_bytes, self.layout_stride = len(layout), len(padded)
        self.description = text
        self.put_layout("bytes", len(layout))
        self.put_layout("description_bytes", len(text))
        self.put("layout_bytes", len(layout))
        self.put("container_bytes", len(self.data))

    def seal(self):
        """Right checksums for what has been put."""
        for copy in range(2):
            at = self.layout_at + copy * self.layout_stride
            checksum = xxh3(self.data[at + 16:at + self.layout_bytes], _LAYOUT_MAGIC)
            struct.pack_into("<Q", self.data, at + 8, checksum)
        self.put("layout_checksum", checksum)
        self.seal_superblocks()

    def seal_superblocks(self):
        for copy in range(SUPERBLOCKS):
            at = copy * STRIDE
            checksum = xxh3(self.data[at + 16:at + SUPERBLOCK_BYTES], _SUPERBLOCK_MAGIC)
            struct.pack_into("<Q", self.data, at + 8, checksum)
