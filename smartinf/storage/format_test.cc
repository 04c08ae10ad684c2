#include "smartinf/storage/format.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/checksum.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using base::PlaneKind;
using base::SubgroupId;

constexpr base::StateFormat kM24Q8{base::MomentFormat::kQ8, base::MasterFormat::kM24};

StoreLayout layout_of(base::StateFormat format) {
  StoreLayout layout;
  layout.run = make_run_id();
  layout.device_index = 1;
  layout.device_count = 3;
  layout.format = format;
  layout.planes = {PlaneKind::kMaster, PlaneKind::kMomentum, PlaneKind::kVariance};
  layout.subgroups = {{SubgroupId{4}, 0, 100'000}, {SubgroupId{9}, 500'000, 7}};
  layout.gradient_spill_bytes = 4;
  layout.description = "description";
  return layout;
}

Superblock superblock_of(const StoreLayout& layout, const Geometry& geometry) {
  Superblock superblock{};
  superblock.magic = kSuperblockMagic;
  superblock.version = kFormatVersion;
  superblock.readable_since = readable_since(layout.format);
  superblock.phase = Phase::kComplete;
  superblock.sequence = 5;
  superblock.run = layout.run.bytes;
  superblock.device_index = layout.device_index;
  superblock.device_count = layout.device_count;
  superblock.slots = geometry.slots();
  superblock.container_bytes = geometry.container_bytes();
  superblock.layout_bytes = geometry.layout_bytes();
  superblock.committed_step = superblock.prepared_step = 12;
  const std::vector<std::byte> record = encode_layout(layout);
  LayoutHeader header;
  std::memcpy(&header, record.data(), sizeof(header));
  superblock.layout_checksum = header.checksum;
  return superblock;
}

std::vector<std::byte> bytes_of(Superblock superblock, uint32_t copy) {
  superblock.copy = copy;
  seal_superblock(superblock);
  std::vector<std::byte> bytes(sizeof(superblock));
  std::memcpy(bytes.data(), &superblock, sizeof(superblock));
  return bytes;
}

/// With a right checksum, so that only a bug or malice can have made it.
TEST(SuperblockBytes, CountsBeyondAllBoundsAreNotBelieved) {
  const StoreLayout layout = layout_of(base::StateFormat::kF32);
  const Geometry geometry = *Geometry::make(layout, 2);
  const Superblock sound = superblock_of(layout, geometry);
  ASSERT_TRUE(parse_superblock(bytes_of(sound, 0), 0).ok());
  Superblock devices = sound;
  devices.device_count = 3681404497u;
  EXPECT_EQ(parse_superblock(bytes_of(devices, 0), 0).status().code(), base::ErrorCode::kCorrupt);
  Superblock record = sound;
  record.container_bytes = uint64_t{1} << 40;
  record.layout_bytes = uint64_t{1} << 36;
  EXPECT_EQ(parse_superblock(bytes_of(record, 0), 0).status().code(), base::ErrorCode::kCorrupt);
}

TEST(Geometry, NothingOverlapsAndEverythingIsAligned) {
  for (const auto format :
       {base::StateFormat::kF32, base::StateFormat::kBf16, base::StateFormat::kQ8, kM24Q8}) {
    for (const uint32_t slots : {1u, 2u}) {
      const StoreLayout layout = layout_of(format);
      const auto geometry = Geometry::make(layout, slots);
      ASSERT_TRUE(geometry.ok());
      std::vector<std::pair<uint64_t, uint64_t>> areas;  // offset, bytes
      areas.emplace_back(0, kSuperblockAreaBytes);
      for (uint32_t copy = 0; copy < 2; ++copy) {
        areas.emplace_back(geometry->layout_offset(copy), geometry->layout_bytes());
        for (uint64_t step = 0; step < 2; ++step) {
          areas.emplace_back(geometry->table_offset(step, copy), geometry->table_bytes_max());
        }
      }
      for (size_t i = 0; i < 2; ++i) {
        for (uint32_t slot = 0; slot < slots; ++slot) {
          for (size_t plane = 0; plane < 3; ++plane) {
            areas.emplace_back(geometry->extent_offset(i, slot) + geometry->plane_offset(i, plane),
                               geometry->plane_bytes(i, plane));
          }
        }
        areas.emplace_back(geometry->gradient_offset(i), layout.subgroups[i].count * 4);
      }
      std::sort(areas.begin(), areas.end());
      for (size_t i = 0; i < areas.size(); ++i) {
        EXPECT_EQ(areas[i].first % base::kIoAlignment, 0u);
        const uint64_t end =
            i + 1 < areas.size() ? areas[i + 1].first : geometry->container_bytes();
        EXPECT_LE(areas[i].first + areas[i].second, end);
      }
    }
  }
}

TEST(Geometry, WorkedExample) {  // of docs/format.md
  StoreLayout layout;
  layout.planes = {PlaneKind::kMaster, PlaneKind::kMomentum, PlaneKind::kVariance};
  layout.subgroups = {{SubgroupId{0}, 0, 100'000}};
  const auto geometry = Geometry::make(layout, 2);
  ASSERT_TRUE(geometry.ok());
  EXPECT_EQ(superblock_offset(3), 196608u);
  EXPECT_EQ(geometry->layout_bytes(), 88u);
  EXPECT_EQ(geometry->layout_offset(0), 262144u);
  EXPECT_EQ(geometry->layout_offset(1), 266240u);
  EXPECT_EQ(geometry->table_bytes_max(), 69632u);
  EXPECT_EQ(geometry->table_offset(0, 0), 270336u);
  EXPECT_EQ(geometry->table_offset(0, 1), 339968u);
  EXPECT_EQ(geometry->table_offset(1, 0), 409600u);
  EXPECT_EQ(geometry->table_offset(7, 1), 479232u);
  EXPECT_EQ(geometry->extent_offset(0, 0), 548864u);
  EXPECT_EQ(geometry->block_bytes(0, 0, 0), 262144u);
  EXPECT_EQ(geometry->block_bytes(0, 0, 1), 137856u);
  EXPECT_EQ(geometry->extent_offset(0, 0) + geometry->plane_offset(0, 1), 950272u);
  EXPECT_EQ(geometry->extent_offset(0, 0) + geometry->plane_offset(0, 2), 1351680u);
  EXPECT_EQ(geometry->extent_offset(0, 1), 1753088u);
  EXPECT_EQ(geometry->container_bytes(), 2957312u);
}

TEST(Geometry, RefusesImpossibleLayouts) {
  const auto code = [](auto change) {
    StoreLayout layout = layout_of(base::StateFormat::kF32);
    change(layout);
    return Geometry::make(layout, 2).status().code();
  };
  EXPECT_EQ(code([](StoreLayout&) {}), ErrorCode::kOk);
  EXPECT_EQ(code([](StoreLayout& l) { l.planes.clear(); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code([](StoreLayout& l) { l.planes[0] = PlaneKind::kResidual; }),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(code([](StoreLayout& l) { l.planes[2] = PlaneKind::kMomentum; }),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(code([](StoreLayout& l) { l.subgroups.clear(); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code([](StoreLayout& l) { l.subgroups[1].id = l.subgroups[0].id; }),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(code([](StoreLayout& l) { l.subgroups[1].count = 0; }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code([](StoreLayout& l) { l.subgroups[1].count = ~uint64_t{0}; }),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(code([](StoreLayout& l) { l.device_index = 3; }), ErrorCode::kInvalidArgument);
}

TEST(Superblocks, EveryFlippedBitIsFound) {
  const StoreLayout layout = layout_of(base::StateFormat::kF32);
  std::vector<std::byte> bytes = bytes_of(superblock_of(layout, *Geometry::make(layout, 2)), 2);
  ASSERT_TRUE(parse_superblock(bytes, 2).ok());
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    ASSERT_FALSE(parse_superblock(bytes, 2).ok()) << "bit " << bit;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  EXPECT_FALSE(parse_superblock(bytes, 0).ok()) << "a copy in another's place";
}

TEST(Superblocks, NewestGoodCopyWins) {
  const StoreLayout layout = layout_of(base::StateFormat::kF32);
  Superblock superblock = superblock_of(layout, *Geometry::make(layout, 2));
  std::vector<std::byte> area(kSuperblockAreaBytes);
  uint32_t bad = 0;
  EXPECT_EQ(choose_superblock(area, &bad).status().code(), ErrorCode::kNotFound);
  EXPECT_EQ(bad, 15u);
  for (uint32_t copy = 0; copy < kSuperblockCopies; ++copy) {
    superblock.sequence = 10 + copy % 2;
    const auto bytes = bytes_of(superblock, copy);
    std::memcpy(area.data() + superblock_offset(copy), bytes.data(), bytes.size());
  }
  EXPECT_EQ(choose_superblock(area, &bad)->sequence, 11u);
  EXPECT_EQ(bad, 0u);
  area[superblock_offset(1) + 50] ^= std::byte{4};
  EXPECT_EQ(choose_superblock(area, &bad)->copy, 3u);
  EXPECT_EQ(bad, 2u);
  area[superblock_offset(3) + 50] ^= std::byte{4};
  EXPECT_EQ(choose_superblock(area, &bad)->sequence, 10u);
  area[superblock_offset(0)] ^= std::byte{4};
  area[superblock_offset(2)] ^= std::byte{4};
  EXPECT_EQ(choose_superblock(area).status().code(), ErrorCode::kCorrupt);
}

TEST(Superblocks, NewerFormatIsRefusedByName) {
  const StoreLayout layout = layout_of(base::StateFormat::kF32);
  Superblock superblock = superblock_of(layout, *Geometry::make(layout, 2));
  superblock.version = 9;
  EXPECT_TRUE(parse_superblock(bytes_of(superblock, 0), 0).ok()) << "newer, but readable";
  superblock.readable_since = 9;
  EXPECT_EQ(parse_superblock(bytes_of(superblock, 0), 0).status().code(), ErrorCode::kMismatch);
}

TEST(Layouts, Q8CodesOfAnEarlierVersionAreRefused) {
  for (const auto format : {base::StateFormat::kF32, base::StateFormat::kQ8}) {
    const StoreLayout layout = layout_of(format);
    Superblock superblock = superblock_of(layout, *Geometry::make(layout, 2));
    superblock.version = 1;
    const auto back = parse_layout(encode_layout(layout), superblock);
    EXPECT_EQ(back.status().code(),
              format == base::StateFormat::kQ8 ? ErrorCode::kMismatch : ErrorCode::kOk);
  }
}

// As versions 1 and 2 wrote it: the upper byte of the format was 0.
TEST(Layouts, FormatsOfEarlierVersionsAreRead) {
  const StoreLayout layout = layout_of(base::StateFormat::kQ8);
  const std::vector<std::byte> bytes = encode_layout(layout);
  uint16_t format = 0;
  std::memcpy(&format, bytes.data() + offsetof(LayoutHeader, moment_format), sizeof(format));
  EXPECT_EQ(format, 2u);
  EXPECT_EQ(readable_since(base::StateFormat::kF32), 1u);
  EXPECT_EQ(readable_since(base::StateFormat::kQ8), 2u);
  EXPECT_EQ(readable_since(kM24Q8), 3u);
}

TEST(Layouts, ChecksumsOfAnUnknownKindAreRefused) {
  StoreLayout layout = layout_of(base::StateFormat::kF32);
  layout.checksum_kind = static_cast<ChecksumKind>(7);
  const Superblock superblock = superblock_of(layout, *Geometry::make(layout, 2));
  const auto back = parse_layout(encode_layout(layout), superblock);
  EXPECT_EQ(back.status().code(), ErrorCode::kMismatch);
  EXPECT_NE(back.status().what().find("kind 7"), std::string::npos) << back.status().to_string();
}

TEST(Layouts, ComeBackAndEveryFlippedBitIsFound) {
  const StoreLayout layout = layout_of(kM24Q8);
  const Superblock superblock = superblock_of(layout, *Geometry::make(layout, 2));
  std::vector<std::byte> bytes = encode_layout(layout);
  const auto back = parse_layout(bytes, superblock);
  ASSERT_TRUE(back.ok()) << back.status().to_string();
  EXPECT_EQ(back->run, layout.run);
  EXPECT_EQ(back->device_index, 1u);
  EXPECT_EQ(back->format, layout.format);
  EXPECT_EQ(back->planes, layout.planes);
  EXPECT_EQ(back->description, layout.description);
  EXPECT_EQ(back->gradient_spill_bytes, 4u);
  ASSERT_EQ(back->subgroups.size(), 2u);
  EXPECT_EQ(back->subgroups[1].id, SubgroupId{9});
  EXPECT_EQ(back->subgroups[1].first_element, 500'000u);
  EXPECT_EQ(back->subgroups[1].count, 7u);
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    ASSERT_FALSE(parse_layout(bytes, superblock).ok()) << "bit " << bit;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  for (size_t length = 0; length < bytes.size(); ++length) {
    ASSERT_FALSE(parse_layout(std::span<const std::byte>(bytes).first(length), superblock).ok());
  }
}

TEST(Blocks, ChecksumKnowsEveryPartOfTheIdentity) {
  const std::vector<std::byte> bytes(1000, std::byte{7});
  const RunId run = make_run_id();
  const uint64_t seed = device_seed(run, 1);
  const BlockIdentity identity{3, 1, 5, 1, 100};
  const uint64_t right = block_checksum(bytes, seed, identity);
  EXPECT_EQ(block_checksum(bytes, seed, identity), right);
  const auto differs = [&](auto change) {
    BlockIdentity other = identity;
    change(other);
    return block_checksum(bytes, seed, other) != right;
  };
  EXPECT_TRUE(differs([](BlockIdentity& i) { i.subgroup = 4; }));
  EXPECT_TRUE(differs([](BlockIdentity& i) { i.plane = 2; }));
  EXPECT_TRUE(differs([](BlockIdentity& i) { i.block = 6; }));
  EXPECT_TRUE(differs([](BlockIdentity& i) { i.slot = 0; }));
  EXPECT_TRUE(differs([](BlockIdentity& i) { i.step = 101; }));
  EXPECT_NE(block_checksum(bytes, device_seed(run, 2), identity), right);
  EXPECT_NE(block_checksum(bytes, device_seed(make_run_id(), 1), identity), right);
}

}  // namespace
}  // namespace smartinf::storage
