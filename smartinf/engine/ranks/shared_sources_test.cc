// Tests of what all ranks learn of devices that one of them has.
#include "smartinf/engine/ranks/shared_sources.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/engine/device_share.h"
#include "smartinf/engine/found_run.h"
#include "smartinf/engine/ranks/test_crew.h"

namespace smartinf::engine {
namespace {

/// ask(sources) by each rank of as many as rank_of names, and what each of them heard.
template <typename Answer, typename Ask>
std::vector<Answer> of_all_ranks(const std::vector<std::shared_ptr<FakeDrive>>& drives,
                                 const std::vector<uint32_t>& rank_of, const Ask& ask) {
  const size_t ranks = *std::max_element(rank_of.begin(), rank_of.end()) + 1;
  Board board(static_cast<uint32_t>(ranks));
  std::vector<Answer> answers(ranks);
  on_all_ranks(ranks, [&](size_t rank) {
    DeviceSources sources;
    for (size_t d = 0; d < drives.size(); ++d) {
      // Elsewhere a device of another name, which must not be asked.
      sources.push_back(std::make_unique<FakeSource>(
          rank_of[d] == rank ? drives[d] : std::make_shared<FakeDrive>(),
          "drive" + std::to_string(d)));
    }
    answers[rank] =
        ask(share_sources(std::move(sources), rank_of,
                          std::make_shared<BoardRank>(board, static_cast<uint32_t>(rank))));
  });
  return answers;
}

TEST(SharedSources, AllRanksFindTheRunAndWhatItsTrainerWrote) {
  std::vector<std::shared_ptr<FakeDrive>> drives{std::make_shared<FakeDrive>(),
                                                 std::make_shared<FakeDrive>()};
  UpdaterOptions options;
  options.subgroup_elements = kBlock;
  options.devices.resize(2);
  {
    DeviceSources sources;
    for (size_t d = 0; d < drives.size(); ++d) {
      sources.push_back(std::make_unique<FakeSource>(drives[d], "drive" + std::to_string(d)));
    }
    auto updater = Updater::open(options, contract_space(), std::move(sources));
    ASSERT_TRUE(updater.ok()) << updater.status().to_string();
    initialize(**updater);
    Outcome outcome;
    run_steps(**updater, 1, 2, outcome);
  }
  // The first device, whose metadata count, is the last rank's.
  const auto found = of_all_ranks<std::optional<FoundRun>>(
      drives, {1, 0}, [](const DeviceSources& sources) { return find_run(sources); });
  for (const auto& run : found) {
    ASSERT_TRUE(run.has_value());
    EXPECT_EQ(run->run, drives[0]->state.run);
    EXPECT_EQ(run->step, 2u);
    EXPECT_EQ(run->client_metadata, "after step 2");
  }
}

TEST(SharedSources, EveryRankHasAnEqualPartOfTheSpoolWhateverItsDevices) {
  std::vector<std::shared_ptr<FakeDrive>> drives;
  for (const double bandwidth : {3e9, 1e9, 5e9}) {
    drives.push_back(std::make_shared<FakeDrive>());
    drives.back()->bandwidth = bandwidth;
  }
  const auto shares = of_all_ranks<std::vector<uint64_t>>(
      drives, {0, 0, 1},
      [](const DeviceSources& sources) { return share_spool(8 * base::kMiB, sources).value(); });
  const std::vector<uint64_t> expected{3 * base::kMiB, base::kMiB, 4 * base::kMiB};
  for (const auto& share : shares) EXPECT_EQ(share, expected);
}

}  // namespace
}  // namespace smartinf::engine
