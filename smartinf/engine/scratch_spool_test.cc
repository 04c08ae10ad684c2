// A spool over directories alone: bytes come back, and nothing is left.
#include "smartinf/engine/scratch_spool.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/test_model.h"

namespace smartinf::engine {
namespace {

using base::AlignedBuffer;
using base::ErrorCode;
using base::kMiB;
using ::testing::HasSubstr;

UpdaterOptions scratch_options(const Scratch& scratch, const std::vector<std::string>& names) {
  UpdaterOptions options;
  options.spool_bytes = 4 * kMiB;
  for (const std::string& name : names) options.devices.emplace_back().path = scratch / name;
  return options;
}

bool is_empty(const std::string& folder) { return std::filesystem::is_empty(folder); }

TEST(ScratchSpool, BytesComeBackFromAllDirectoriesWhichAreEmptyAllTheTime) {
  const Scratch scratch;
  UpdaterOptions options = scratch_options(scratch, {"a", "b"});
  options.devices[0].bandwidth = 3;
  options.devices[1].bandwidth = 1;
  auto opened = ScratchSpool::open(options);
  ASSERT_TRUE(opened.ok()) << opened.status().to_string();
  Spool& spool = (*opened)->spool();
  EXPECT_GE(spool.size_bytes(), 4 * kMiB);
  const auto data = AlignedBuffer::allocate(kMiB);
  const auto out = AlignedBuffer::allocate(kMiB);
  std::vector<Spool::Ticket> tickets;
  for (int i = 0; i < 4; ++i) {
    std::memset(data->data(), 'a' + i, data->size());
    const auto ticket = spool.put(data->bytes());
    ASSERT_TRUE(ticket.ok()) << ticket.status().to_string();
    ASSERT_TRUE(spool.wait(*ticket).ok());
    tickets.push_back(*ticket);
  }
  EXPECT_TRUE(is_empty(scratch / "a") && is_empty(scratch / "b"));
  for (int i = 3; i >= 0; --i) {
    ASSERT_TRUE(spool.start_get(tickets[static_cast<size_t>(i)], out->bytes()).ok());
    ASSERT_TRUE(spool.wait(tickets[static_cast<size_t>(i)]).ok());
    EXPECT_TRUE(std::ranges::all_of(
        out->bytes(), [i](std::byte byte) { return byte == static_cast<std::byte>('a' + i); }));
  }
  // Another process may use the same directory meanwhile.
  const auto beside = ScratchSpool::open(options);
  EXPECT_TRUE(beside.ok()) << beside.status().to_string();
  opened->reset();
  EXPECT_TRUE(is_empty(scratch / "a") && is_empty(scratch / "b"));
}

TEST(ScratchSpool, ADirectoryWithARunsStateIsRefusedAndLeftAlone) {
  const Scratch scratch;
  const UpdaterOptions run =
      options_of({.name = "", .devices = 1, .subgroup_elements = kBlock}, scratch);
  {
    auto updater = Updater::open(run, contract_space());
    ASSERT_TRUE(updater.ok()) << updater.status().to_string();
    initialize(**updater);
  }
  UpdaterOptions options = run;
  options.spool_bytes = kMiB;
  const auto refused = ScratchSpool::open(options);
  EXPECT_EQ(refused.status().code(), ErrorCode::kAlreadyExists);
  EXPECT_THAT(refused.status().to_string(), HasSubstr("a directory of their own"));
  const auto again = Updater::open(run, contract_space());
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  EXPECT_FALSE((*again)->fresh());
}

TEST(ScratchSpool, WhatIsNoDirectoryAndWhatDoesNotFitAreRefusedByName) {
  const Scratch scratch;
  EXPECT_EQ(ScratchSpool::open(scratch_options(scratch, {})).status().code(),
            ErrorCode::kInvalidArgument);
  std::ofstream(scratch / "file") << "text";
  const auto file = ScratchSpool::open(scratch_options(scratch, {"file"}));
  EXPECT_EQ(file.status().code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(file.status().to_string(), HasSubstr("file"));
  UpdaterOptions large = scratch_options(scratch, {"large"});
  large.spool_bytes = uint64_t{1} << 50;
  const auto full = ScratchSpool::open(large);
  EXPECT_EQ(full.status().code(), ErrorCode::kNoSpace) << full.status().to_string();
  EXPECT_TRUE(is_empty(scratch / "large"));
}

}  // namespace
}  // namespace smartinf::engine
