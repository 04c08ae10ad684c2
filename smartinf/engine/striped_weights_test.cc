// Weights in stripes on several directories: their bits, who may have them, and what is refused.
#include "smartinf/engine/striped_weights.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/checksum.h"
#include "smartinf/base/file.h"
#include "smartinf/engine/layer_window.h"
#include "smartinf/engine/test_model.h"
#include "smartinf/kernels/update.h"

namespace smartinf::engine {
namespace {

using base::ErrorCode;
using base::Status;
using ::testing::HasSubstr;

constexpr uint64_t kStripe = 2 * kBlock;  // elements

/// Finite values of every kind.
std::vector<std::byte> values_of(DataType type, uint64_t count) {
  std::vector<std::byte> bytes(count * base::data_type_bytes(type));
  for (uint64_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(i % 4099) / 64 - 30;
    kernels::kernels().cast_from_f32(&value, &bytes[i * base::data_type_bytes(type)], type, 1);
  }
  return bytes;
}

class Striped : public ::testing::Test {
 protected:
  /// Directories that exist.
  std::vector<std::string> directories(size_t count) {
    std::vector<std::string> all;
    for (size_t i = 0; i < count; ++i) {
      all.push_back(scratch_ / ("drive" + std::to_string(i)));
      std::filesystem::create_directory(all.back());
    }
    return all;
  }
  static std::string file_in(const std::string& directory) { return directory + "/weights"; }

  std::unique_ptr<StripedWeights> create(const std::vector<std::string>& directories,
                                         uint64_t elements, DataType type = DataType::kBf16) {
    auto made = StripedWeights::create(
        {directories, elements, type, "what they are", kStripe * base::data_type_bytes(type)});
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    return made.ok() ? std::move(*made) : nullptr;
  }
  /// Written in pieces of odd lengths and closed; their values.
  std::vector<std::byte> make(const std::vector<std::string>& directories, uint64_t elements,
                              DataType type = DataType::kBf16) {
    std::vector<std::byte> values = values_of(type, elements);
    const auto weights = create(directories, elements, type);
    uint64_t length = 77;
    for (uint64_t first = 0; first < elements;) {
      const uint64_t here = std::min(length, elements - first);
      expect_ok(weights->write(first, &values[first * base::data_type_bytes(type)], here));
      first += here;
      length = length * 3 + 1;
    }
    expect_ok(weights->finish());
    return values;
  }
  std::unique_ptr<StripedWeights> open(const std::vector<std::string>& directories) {
    auto opened = StripedWeights::open(directories);
    EXPECT_TRUE(opened.ok()) << opened.status().to_string();
    return opened.ok() ? std::move(*opened) : nullptr;
  }
  static Status refusal(const std::vector<std::string>& directories) {
    return StripedWeights::open(directories).status();
  }
  static void flip(const std::string& path, std::streamoff offset) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(offset);
    const char byte = static_cast<char>(file.get() ^ 0x10);
    file.seekp(offset);
    file.put(byte);
    ASSERT_TRUE(file.good());
  }

  Scratch scratch_;
};

TEST_F(Striped, ComeBackBitForBitOverAnyNumberOfDirectories) {
  for (const size_t count : {1, 2, 3}) {
    for (const DataType type : {DataType::kF32, DataType::kBf16, DataType::kF16}) {
      for (const uint64_t elements : {uint64_t{1}, kStripe, 5 * kStripe + 333}) {
        SCOPED_TRACE(elements);
        const auto where = directories(count);
        const std::vector<std::byte> values = make(where, elements, type);
        const auto weights = open(where);
        ASSERT_NE(weights, nullptr);
        EXPECT_EQ(weights->elements(), elements);
        EXPECT_EQ(weights->type(), type);
        EXPECT_EQ(weights->description(), "what they are");
        std::vector<std::byte> all(values.size());
        const uint64_t each = base::data_type_bytes(type);
        expect_ok(weights->load_weights(type, [&](uint64_t first) { return &all[first * each]; }));
        EXPECT_EQ(all, values);
      }
    }
  }
}

/// The grammar in striped_weights.h, byte for byte: two stripes and a shorter one over two files.
TEST_F(Striped, HaveTheBytesThatTheHeaderFileDescribes) {
  const auto where = directories(2);
  const std::vector<std::byte> values = make(where, 2 * kStripe + 5);
  const std::string description = "what they are";
  const uint64_t stripe_bytes = kStripe * base::data_type_bytes(DataType::kBf16);
  const auto stripe = [&](uint64_t number) {
    const uint64_t first = number * stripe_bytes;
    return std::span(values).subspan(first, std::min(stripe_bytes, values.size() - first));
  };
  std::vector<std::string> sets;
  for (uint32_t file = 0; file < 2; ++file) {
    SCOPED_TRACE(file);
    auto text = base::read_text_file(file_in(where[file]), "cannot read it");
    ASSERT_TRUE(text.ok());
    const std::span<const std::byte> bytes = std::as_bytes(std::span(*text));
    const std::vector<uint64_t> stripes =
        file == 0 ? std::vector<uint64_t>{0, 2} : std::vector<uint64_t>{1};
    ASSERT_EQ(bytes.size(), 4096 + base::round_up(stripe(stripes.back()).size(), 4096) +
                                (stripes.size() - 1) * stripe_bytes);

    const auto number = [&](size_t at, size_t size) {
      uint64_t read = 0;
      std::memcpy(&read, &bytes[at], size);
      return read;
    };
    EXPECT_EQ(text->substr(0, 8), "SIWEIGHT");
    EXPECT_EQ(number(16, 4), 1u) << "version";
    EXPECT_EQ(number(20, 4), static_cast<uint64_t>(DataType::kBf16));
    sets.push_back(text->substr(24, 16));
    EXPECT_EQ(number(40, 4), file);
    EXPECT_EQ(number(44, 4), 2u) << "files";
    EXPECT_EQ(number(48, 8), 2 * kStripe + 5);
    EXPECT_EQ(number(56, 8), kStripe);
    EXPECT_EQ(number(64, 8), description.size());
    EXPECT_EQ(text->substr(72, description.size()), description);
    const size_t checksums = 72 + description.size();
    const size_t end = checksums + stripes.size() * 8;
    EXPECT_EQ(number(8, 8), base::checksum(bytes.subspan(16, 4096 - 16)));
    EXPECT_EQ(text->substr(end, 4096 - end), std::string(4096 - end, '\0'));
    for (size_t i = 0; i < stripes.size(); ++i) {
      const auto of = stripe(stripes[i]);
      const auto there = bytes.subspan(4096 + i * stripe_bytes);
      EXPECT_TRUE(std::ranges::equal(there.first(of.size()), of));
      const auto gap = there.subspan(of.size(), base::round_up(of.size(), 4096) - of.size());
      EXPECT_EQ(std::ranges::count(gap, std::byte{0}), std::ssize(gap));
      EXPECT_EQ(number(checksums + i * 8, 8), base::checksum(of));
    }
  }
  EXPECT_EQ(sets[0], sets[1]);
}

TEST_F(Striped, AreReadIntoAlignedMemoryAndOtherMemory) {
  const auto where = directories(2);
  const std::vector<std::byte> values = make(where, 3 * kStripe + 1, DataType::kF32);
  const auto weights = open(where);
  auto memory = base::AlignedBuffer::allocate(values.size() + 8 * base::kPageBytes);
  ASSERT_TRUE(memory.ok());
  for (const uint64_t shift : {0, 4, 4096}) {
    std::memset(memory->data(), 0x55, memory->size());
    std::byte* out = memory->data() + shift;
    expect_ok(
        weights->load_weights(DataType::kF32, [&](uint64_t first) { return out + first * 4; }));
    EXPECT_EQ(0, std::memcmp(out, values.data(), values.size())) << shift;
    EXPECT_EQ(out[values.size()], std::byte{0x55}) << "nothing beyond the last element";
  }
}

TEST_F(Striped, AreCastAsTheKernelsCast) {
  const auto where = directories(1);
  const uint64_t elements = kStripe + 1000;
  for (const DataType type : {DataType::kF32, DataType::kBf16}) {
    make(where, elements, type);
    for (const DataType wanted : {DataType::kF32, DataType::kBf16, DataType::kF16}) {
      std::vector<std::byte> expected = values_of(wanted, elements);
      if (type == DataType::kBf16) {  // what was rounded once
        const std::vector<std::byte> own = values_of(type, elements);
        std::vector<float> wide(elements);
        kernels::kernels().cast_to_f32(own.data(), type, wide.data(), elements);
        kernels::kernels().cast_from_f32(wide.data(), expected.data(), wanted, elements);
      }
      std::vector<std::byte> all(expected.size());
      const uint64_t each = base::data_type_bytes(wanted);
      expect_ok(
          open(where)->load_weights(wanted, [&](uint64_t first) { return &all[first * each]; }));
      EXPECT_EQ(all, expected);
    }
  }
}

TEST_F(Striped, PassThroughALayerWindow) {
  const auto where = directories(3);
  const uint64_t elements = 7 * kStripe + 5;
  const std::vector<std::byte> values = make(where, elements);
  const auto weights = open(where);
  LayerWindow::Options options;
  for (uint32_t i = 0; i < 5; ++i) {
    const uint64_t first = elements * i / 5;
    options.units.push_back({first, elements * (i + 1) / 5 - first, i, 1});
  }
  std::vector<std::vector<std::byte>> memory;
  for (const uint64_t size : window_slot_bytes(*weights, options.units, DataType::kBf16, 2)) {
    options.slots.emplace_back(memory.emplace_back(size));
  }
  const std::vector<plan::Unit> units = options.units;
  LayerWindow window(*weights, std::move(options));
  const std::vector<uint32_t> order = {0, 1, 2, 3, 4, 3, 2, 1, 0};
  window.start(order);
  for (const uint32_t unit : order) {
    const auto got = window.get(unit);
    ASSERT_TRUE(got.ok()) << got.status().to_string();
    EXPECT_EQ(0, std::memcmp(*got, &values[units[unit].first * 2], units[unit].count * 2));
    window.release(unit);
  }
}

TEST_F(Striped, MayBeReadByWhoWroteThemOnceTheyAreFinished) {
  const uint64_t elements = kStripe + 3;
  const std::vector<std::byte> values = values_of(DataType::kBf16, elements);
  const auto where = directories(2);
  const auto weights = create(where, elements);
  expect_ok(weights->write(0, values.data(), elements));
  std::vector<std::byte> all(values.size());
  const auto load = [&] {
    return weights->load_weights(DataType::kBf16, [&](uint64_t first) { return &all[first * 2]; });
  };
  EXPECT_EQ(load().code(), ErrorCode::kFailedPrecondition);
  expect_ok(weights->finish());
  expect_ok(load());
  EXPECT_EQ(all, values);
  EXPECT_NE(open(where), nullptr) << "others may read them too";
}

TEST_F(Striped, AreWrittenInAscendingOrderAndWhole) {
  const std::vector<std::byte> values = values_of(DataType::kBf16, 2 * kStripe);
  const auto weights = create(directories(1), 2 * kStripe);
  expect_ok(weights->write(0, values.data(), 10));
  EXPECT_EQ(weights->write(11, values.data(), 1).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(weights->write(9, values.data(), 1).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(weights->write(10, values.data(), 2 * kStripe).code(), ErrorCode::kInvalidArgument);
  const Status early = weights->finish();
  EXPECT_EQ(early.code(), ErrorCode::kFailedPrecondition);
  EXPECT_THAT(early.to_string(), HasSubstr("10 of 262144"));
  expect_ok(weights->write(10, values.data(), 2 * kStripe - 10));
  expect_ok(weights->finish());
  EXPECT_EQ(weights->finish().code(), ErrorCode::kFailedPrecondition);
  EXPECT_EQ(weights->write(0, values.data(), 1).code(), ErrorCode::kFailedPrecondition);
}

TEST_F(Striped, AFlippedBitIsAnErrorThatNamesTheFileAndTheOthersCome) {
  const auto where = directories(3);
  make(where, 6 * kStripe);
  // The second stripe of the second file: the fifth of all.
  flip(file_in(where[1]), static_cast<std::streamoff>(4096 + kStripe * 2 + 1234));
  const auto weights = open(where);
  std::vector<std::byte> all(12 * kStripe);
  for (int attempt = 0; attempt < 2; ++attempt) {
    for (uint64_t first = 0; first < 6 * kStripe; first += kStripe) {
      expect_ok(weights->fetch_weights(first, DataType::kBf16, &all[first * 2]));
    }
    for (uint64_t first = 0; first < 6 * kStripe; first += kStripe) {
      const Status status = weights->wait_fetched(first);
      EXPECT_EQ(status.ok(), first != 4 * kStripe) << first;
      if (status.ok()) continue;
      EXPECT_EQ(status.code(), ErrorCode::kCorrupt);
      EXPECT_EQ(status.place().path, file_in(where[1]));
    }
  }
}

TEST_F(Striped, AStripeInTheWrongPlaceIsFound) {
  const auto where = directories(1);
  make(where, 3 * kStripe);
  {
    std::fstream file(file_in(where[0]), std::ios::in | std::ios::out | std::ios::binary);
    std::string stripe(kStripe * 2, '\0');
    file.seekg(4096);
    file.read(stripe.data(), static_cast<std::streamsize>(stripe.size()));
    file.seekp(static_cast<std::streamoff>(4096 + 2 * stripe.size()));
    file.write(stripe.data(), static_cast<std::streamsize>(stripe.size()));
  }
  std::vector<std::byte> all(3 * kStripe * 2);
  EXPECT_EQ(open(where)
                ->load_weights(DataType::kBf16, [&](uint64_t first) { return &all[first * 2]; })
                .code(),
            ErrorCode::kCorrupt);
}

TEST_F(Striped, UnfinishedDamagedAndShortFilesAreRefused) {
  const auto where = directories(2);
  const auto expect_refused = [&](size_t file, const char* why) {
    const Status status = refusal(where);
    EXPECT_EQ(status.code(), ErrorCode::kCorrupt) << why;
    EXPECT_THAT(status.to_string(), HasSubstr(why));
    EXPECT_EQ(status.place().path, file_in(where[file]));
  };
  const std::vector<std::byte> values = values_of(DataType::kBf16, 4 * kStripe);
  expect_ok(create(where, 4 * kStripe)->write(0, values.data(), 4 * kStripe));
  expect_refused(0, "not written to their end");
  make(where, 4 * kStripe);
  for (const std::streamoff offset : {8, 20, 60, 73, 90}) {
    flip(file_in(where[1]), offset);
    EXPECT_THAT(refusal(where).place().path, file_in(where[1])) << offset;
    EXPECT_FALSE(refusal(where).ok()) << offset;
    flip(file_in(where[1]), offset);
  }
  EXPECT_NE(open(where), nullptr);
  std::filesystem::resize_file(file_in(where[1]), 8192);
  expect_refused(1, "8192 bytes");
  std::filesystem::resize_file(file_in(where[1]), 0);
  expect_refused(1, "not written to their end");
}

TEST_F(Striped, FilesThatDoNotBelongTogetherAreRefused) {
  const auto where = directories(3);
  EXPECT_EQ(open(where), nullptr) << "none is there";
  const std::vector<std::byte> values = make(where, 4 * kStripe);
  EXPECT_EQ(refusal({where[0], where[1]}).code(), ErrorCode::kMismatch);
  EXPECT_EQ(refusal({where[0], where[1], where[1]}).code(), ErrorCode::kInvalidArgument);
  const auto turned = open({where[2], where[0], where[1]});
  ASSERT_NE(turned, nullptr);
  std::vector<std::byte> all(values.size());
  expect_ok(turned->load_weights(DataType::kBf16, [&](uint64_t first) { return &all[first * 2]; }));
  EXPECT_EQ(all, values) << "in any order";
  const Status busy = StripedWeights::remove({where[1]});
  EXPECT_EQ(busy.code(), ErrorCode::kBusy);
  std::filesystem::copy_file(file_in(where[1]), scratch_ / "other");
  std::filesystem::remove(file_in(where[1]));
  const Status missing = refusal(where);
  EXPECT_EQ(missing.code(), ErrorCode::kNotFound);
  EXPECT_EQ(missing.place().path, file_in(where[1]));
}

TEST_F(Striped, TheSameFileTwiceIsRefused) {
  const auto where = directories(2);
  make(where, 4 * kStripe);
  std::filesystem::copy_file(file_in(where[0]), file_in(where[1]),
                             std::filesystem::copy_options::overwrite_existing);
  const Status status = refusal(where);
  EXPECT_EQ(status.code(), ErrorCode::kMismatch);
  EXPECT_EQ(status.place().path, file_in(where[1]));
}

TEST_F(Striped, OfAnotherTimeAreNotTakenForTheSameOnes) {
  const auto where = directories(2);
  make(where, 4 * kStripe);
  std::filesystem::copy_file(file_in(where[1]), scratch_ / "earlier");
  make(where, 4 * kStripe);
  std::filesystem::copy_file(scratch_ / "earlier", file_in(where[1]),
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_EQ(refusal(where).code(), ErrorCode::kMismatch);
}

TEST_F(Striped, NobodyRewritesWhatIsReadNorReadsWhatIsWritten) {
  const auto where = directories(2);
  const std::vector<std::byte> values = make(where, kStripe + 1);
  const StripedWeights::Options options{where, kStripe, DataType::kBf16, "", kStripe * 2};
  {
    const auto first = open(where);
    const auto second = open(where);
    ASSERT_TRUE(first != nullptr && second != nullptr) << "many may read";
    const Status busy = StripedWeights::create(options).status();
    EXPECT_EQ(busy.code(), ErrorCode::kBusy);
    EXPECT_EQ(busy.place().path, file_in(where[0]));
  }
  std::vector<std::byte> all(values.size());
  expect_ok(
      open(where)->load_weights(DataType::kBf16, [&](uint64_t first) { return &all[first * 2]; }));
  EXPECT_EQ(all, values) << "a refused create() has changed nothing";
  const auto writing = StripedWeights::create(options);
  ASSERT_TRUE(writing.ok());
  EXPECT_EQ(refusal(where).code(), ErrorCode::kBusy);
  EXPECT_EQ(StripedWeights::create(options).status().code(), ErrorCode::kBusy);
}

TEST_F(Striped, ARefusedCreateLeavesTheOtherDirectoriesAsTheyWere) {
  const auto where = directories(3);
  const std::vector<std::byte> values = make({where[0]}, kStripe + 1);
  make({where[1]}, kStripe);
  const auto reading = open({where[1]});
  const StripedWeights::Options options{
      {where[0], where[2], where[1]}, kStripe, DataType::kBf16, "", kStripe * 2};
  EXPECT_EQ(StripedWeights::create(options).status().code(), ErrorCode::kBusy);
  std::vector<std::byte> all(values.size());
  expect_ok(open({where[0]})->load_weights(DataType::kBf16, [&](uint64_t first) {
    return &all[first * 2];
  }));
  EXPECT_EQ(all, values);
  EXPECT_TRUE(std::filesystem::is_empty(where[2]));
}

TEST_F(Striped, CreateRefusesWhatCannotBeAndLeavesNothing) {
  auto where = directories(2);
  const auto code = [](const std::vector<std::string>& directories, uint64_t elements,
                       uint64_t stripe_bytes = kStripe * 2) {
    return StripedWeights::create({directories, elements, DataType::kBf16, "", stripe_bytes})
        .status()
        .code();
  };
  EXPECT_EQ(code({}, 1), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code(where, 0), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code(where, 1, kBlock), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code({where[0], scratch_ / "none"}, 1), ErrorCode::kNotFound);
  EXPECT_EQ(code({where[0], where[1] + "/."}, 1), ErrorCode::kOk);
  EXPECT_EQ(code({where[0], where[0] + "/."}, 1), ErrorCode::kInvalidArgument);
  expect_ok(StripedWeights::remove(where));
  const Status full =
      StripedWeights::create({where, uint64_t{1} << 50, DataType::kBf16, "", uint64_t{1} << 40})
          .status();
  EXPECT_EQ(full.code(), ErrorCode::kNoSpace) << full.to_string();
  for (const std::string& directory : where) {
    EXPECT_TRUE(std::filesystem::is_empty(directory)) << directory;
  }
}

TEST_F(Striped, FetchesOutOfOrderAreRefused) {
  const auto where = directories(1);
  make(where, 2 * kStripe);
  const auto weights = open(where);
  std::vector<std::byte> out(kStripe * 2);
  EXPECT_EQ(weights->fetch_weights(1, DataType::kBf16, out.data()).code(),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(weights->fetch_weights(2 * kStripe, DataType::kBf16, out.data()).code(),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(weights->wait_fetched(0).code(), ErrorCode::kFailedPrecondition);
  expect_ok(weights->fetch_weights(0, DataType::kBf16, out.data()));
  EXPECT_EQ(weights->fetch_weights(0, DataType::kBf16, out.data()).code(),
            ErrorCode::kFailedPrecondition);
  expect_ok(weights->wait_fetched(0));
}

}  // namespace
}  // namespace smartinf::engine
