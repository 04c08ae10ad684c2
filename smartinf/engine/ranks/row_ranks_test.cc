// Tables whose rows several ranks have: the bits of one process, and one outcome on all ranks.
#include "smartinf/engine/ranks/row_ranks.h"

#include <array>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/test_scratch.h"
#include "smartinf/engine/checkpoint.h"
#include "smartinf/engine/ranks/test_collectives.h"
#include "smartinf/engine/ranks/test_crew.h"
#include "smartinf/engine/row_tables.h"
#include "smartinf/engine/test_model.h"
#include "smartinf/engine/test_row_model.h"
#include "smartinf/engine/updater.h"

namespace smartinf::engine {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using kernels::RowRule;
using ::testing::HasSubstr;

constexpr size_t kTwoRanks = 2;
constexpr uint64_t kRowsShared = 3000;
constexpr uint32_t kDimShared = 10;
constexpr size_t kIdsOfStep = 500;  // of a step

/// Two ranks that share a run, or have a run each.
class RowRanksTest : public ::testing::TestWithParam<bool> {
 protected:
  using Each = std::vector<Status>;
  RowRanksTest() {
    add_table(RowRule::kSparseAdam);
    add_table(RowRule::kRowAdam);
  }
  void add_table(RowRule rule) {
    TableOptions& table = tables_.emplace_back();
    table.name = kernels::row_rule_name(rule);
    table.rows = kRowsShared;
    table.dim = kDimShared;
    table.rule.rule = rule;
    table.start = {0.02, 7};
  }
  bool shared() const { return GetParam(); }

  UpdaterOptions options_of(size_t rank, size_t devices) const {
    UpdaterOptions options;
    options.memory_budget_bytes = 64 * base::kMiB;
    options.subgroup_elements = kBlock;
    options.gradient_type = DataType::kF32;
    options.ring = storage::RingKind::kThreads;
    options.pin_threads = false;
    options.tables = tables_;
    options.table_memory_bytes = 24 * base::kMiB * devices * kTwoRanks;
    options.table_log_bytes = 4 * base::kMiB * devices * kTwoRanks;
    for (size_t d = 0; d < devices * kTwoRanks; ++d) {
      if (!shared() && d / devices != rank) continue;
      DeviceOptions& device = options.devices.emplace_back();
      device.path = scratch_ / fmt::format("device{}", d);
      device.threads = 1;
      device.bandwidth = 1;
      device.rank = shared() ? static_cast<uint32_t>(d / devices) : 0;
    }
    auto ranks = std::make_shared<BoardRank>(*board_, static_cast<uint32_t>(rank));
    (shared() ? options.collectives : options.peers) = std::move(ranks);
    return options;
  }
  plan::ParameterSpace space_of(size_t rank) const {
    plan::ParameterSpace space;
    EXPECT_TRUE(space.add(shared() ? "all" : fmt::format("part{}", rank), {8 * kBlock}, 0).ok());
    return space;
  }
  Each each(const std::function<Status(size_t, Updater&)>& call) {
    Each said(kTwoRanks);
    on_all_ranks(kTwoRanks, [&](size_t rank) { said[rank] = call(rank, *ranks_[rank]); });
    return said;
  }
  void all(const std::function<Status(size_t, Updater&)>& call) {
    for (const Status& said : each(call)) EXPECT_TRUE(said.ok()) << said.to_string();
  }
  void close() {
    on_all_ranks(kTwoRanks, [&](size_t rank) { ranks_[rank].reset(); });
  }
  Each open(size_t devices) {
    close();
    board_ = std::make_shared<Board>(kTwoRanks);
    Each said(kTwoRanks);
    on_all_ranks(kTwoRanks, [&](size_t rank) {
      auto opened = Updater::open(options_of(rank, devices), space_of(rank));
      said[rank] = opened.status();
      if (opened.ok()) ranks_[rank] = std::move(*opened);
    });
    return said;
  }
  void open_fresh(size_t devices) {
    for (const Status& said : open(devices)) ASSERT_TRUE(said.ok()) << said.to_string();
    all([](size_t, Updater& updater) {
      return updater.initialize(
          [](uint64_t, std::span<float> out) {
            std::ranges::fill(out, 0.5f);
            return Status();
          },
          "step 0");
    });
  }
  /// Rank 0 has three fifths of the batch, rank 1 the rest.
  static std::pair<size_t, size_t> part_of(size_t rank) {
    return rank == 0 ? std::pair<size_t, size_t>(0, 300) : std::pair<size_t, size_t>(300, 200);
  }
  Status step(size_t rank, Updater& updater, uint64_t number) const {
    const auto [first, count] = part_of(rank);
    const Batch ahead = batch_of(number * 8, kRowsShared, kDimShared, kIdsOfStep);
    std::vector<float> out(count * kDimShared);
    SI_RETURN_IF_ERROR(updater.tables()->gather(0, std::span(ahead.ids).subspan(first, count),
                                                DataType::kF32, out.data()));
    SI_RETURN_IF_ERROR(updater.begin_step());
    const std::vector<base::Bf16> dense(updater.space().count());
    SI_RETURN_IF_ERROR(updater.put_gradient(0, dense.data(), DataType::kBf16, dense.size()));
    for (size_t t = 0; t < tables_.size(); ++t) {
      const Batch batch = batch_of(number * 8 + t, kRowsShared, kDimShared, kIdsOfStep);
      SI_RETURN_IF_ERROR(updater.tables()->add_gradient(
          t, std::span(batch.ids).subspan(first, count), DataType::kF32,
          batch.gradients.data() + first * kDimShared));
    }
    SI_ASSIGN_OR_RETURN(const GradientSummary summary, updater.finish_gradients(1));
    norms_[rank].push_back(summary.norm);
    UpdateOptions update;
    update.number = number;
    update.gradient_scale = 0.5;
    update.groups = {{.lr = 0.01}};
    SI_RETURN_IF_ERROR(updater.start_update(update, DataType::kBf16, nullptr));
    return updater.commit("after " + std::to_string(number));
  }
  Reference reference_after(uint64_t steps) const {
    Reference reference(tables_);
    for (uint64_t number = 1; number <= steps; ++number) {
      for (size_t t = 0; t < tables_.size(); ++t) {
        const Batch batch = batch_of(number * 8 + t, kRowsShared, kDimShared, kIdsOfStep);
        reference.step(t, batch.ids, batch.gradients, number, 0.01, 0.5);
      }
    }
    return reference;
  }
  void expect_records(const Reference& reference) {
    for (size_t t = 0; t < tables_.size(); ++t) {
      all([&](size_t, Updater& updater) -> Status {
        uint64_t bad = 0;
        SI_RETURN_IF_ERROR(updater.tables()->read_records(
            t, 0, kRowsShared, [&](uint64_t first, std::span<const std::byte> records) {
              const size_t bytes = reference.record(t, 0).size();
              for (size_t i = 0; i * bytes < records.size(); ++i) {
                const auto there = records.subspan(i * bytes, bytes);
                bad += std::ranges::equal(there, reference.record(t, first + i)) ? 0 : 1;
              }
              return Status();
            }));
        EXPECT_EQ(bad, 0u) << tables_[t].name;
        return Status();
      });
    }
  }

  Scratch scratch_;
  std::vector<TableOptions> tables_;
  std::shared_ptr<Board> board_;
  std::array<std::unique_ptr<Updater>, kTwoRanks> ranks_;
  mutable std::array<std::vector<double>, kTwoRanks> norms_;
};

TEST_P(RowRanksTest, HaveTheBitsOfOneProcess) {
  add_table(RowRule::kAdamW);  // which catches up
  for (const size_t devices : {1, 2}) {
    SCOPED_TRACE(devices);
    open_fresh(devices);
    if (HasFatalFailure()) return;
    for (uint64_t number = 1; number <= 4; ++number) {
      all([&](size_t rank, Updater& updater) { return step(rank, updater, number); });
    }
    const Reference reference = reference_after(4);
    expect_records(reference);
    // Each rank gathers other rows, of which many are the other's.
    all([&](size_t rank, Updater& updater) -> Status {
      const Batch batch = batch_of(100 + rank, kRowsShared, kDimShared, 200 + 50 * rank);
      std::vector<float> out(batch.ids.size() * kDimShared);
      SI_RETURN_IF_ERROR(updater.tables()->gather(1, batch.ids, DataType::kF32, out.data(), false));
      EXPECT_EQ(out, reference.weights(1, batch.ids));
      return Status();
    });
    EXPECT_EQ(norms_[0], norms_[1]);
    // The norm of all rows, in one order.
    EXPECT_EQ(std::vector(norms_[0].end() - 4, norms_[0].end()),
              std::vector(norms_[0].begin(), norms_[0].begin() + 4));
    close();
    std::filesystem::remove_all(scratch_ / "device0");
    for (size_t d = 1; d < devices * kTwoRanks; ++d) {
      std::filesystem::remove_all(scratch_ / fmt::format("device{}", d));
    }
  }
}

TEST_P(RowRanksTest, AddToRowsInTheOrderOfOneProcess) {
  add_table(RowRule::kSgd);
  const size_t scratch = tables_.size() - 1;
  tables_[scratch].kind = storage::RowTableKind::kScratch;
  tables_[scratch].start = {};
  open_fresh(1);
  if (HasFatalFailure()) return;
  std::map<int64_t, std::vector<float>> rows;
  for (uint64_t number = 1; number <= 2; ++number) {
    const Batch batch = batch_of(number, kRowsShared, kDimShared, kIdsOfStep);
    all([&](size_t rank, Updater& updater) {
      const auto [first, count] = part_of(rank);
      return updater.tables()->scatter_add(
          scratch, std::span(batch.ids).subspan(first, count),
          std::span(batch.gradients).subspan(first * kDimShared, count * kDimShared));
    });
    std::map<int64_t, std::vector<float>> sums;  // of a batch, before they are added
    for (size_t i = 0; i < batch.ids.size(); ++i) {
      std::vector<float>& sum = sums.try_emplace(batch.ids[i], kDimShared, 0.0f).first->second;
      for (size_t d = 0; d < kDimShared; ++d) sum[d] += batch.gradients[i * kDimShared + d];
    }
    for (const auto& [id, sum] : sums) {
      std::vector<float>& row = rows.try_emplace(id, kDimShared, 0.0f).first->second;
      for (size_t d = 0; d < kDimShared; ++d) row[d] += sum[d];
    }
  }
  std::vector<int64_t> ids;
  std::vector<float> expected;
  for (const auto& [id, row] : rows) {
    ids.push_back(id);
    expected.insert(expected.end(), row.begin(), row.end());
  }
  all([&](size_t, Updater& updater) -> Status {
    std::vector<float> out(expected.size());
    SI_RETURN_IF_ERROR(
        updater.tables()->gather(scratch, ids, DataType::kF32, out.data(), /*keep=*/false));
    EXPECT_EQ(out, expected);
    return Status();
  });
}

TEST_P(RowRanksTest, GoBackToACheckpointOfAll) {
  add_table(RowRule::kAdamW);  // which catches up
  open_fresh(2);
  if (HasFatalFailure()) return;
  const auto path_of = [&](size_t rank) {
    return scratch_ / (shared() ? "all" : fmt::format("of_rank{}", rank));
  };
  for (uint64_t number = 1; number <= 5; ++number) {
    all([&](size_t rank, Updater& updater) { return step(rank, updater, number); });
    if (number != 3) continue;
    all([&](size_t rank, Updater& updater) {
      CheckpointOptions options;
      options.path = path_of(rank);
      return write_checkpoint(updater, options).status();
    });
  }
  expect_records(reference_after(5));
  // With as many devices, and with fewer: rows change their rank.
  for (const size_t devices : {2, 1}) {
    SCOPED_TRACE(devices);
    if (devices == 1) {
      close();
      std::filesystem::rename(scratch_ / "device1", scratch_ / "another1");
      std::filesystem::rename(scratch_ / "device0", scratch_ / "another0");
      open_fresh(devices);
      if (HasFatalFailure()) return;
    }
    all([&](size_t, Updater& updater) -> Status {
      std::vector<StoredRun> runs;
      std::vector<csd::Snapshot*> snapshots;
      for (size_t rank = 0; rank < (shared() ? 1 : kTwoRanks); ++rank) {
        SI_ASSIGN_OR_RETURN(const Checkpoint there, read_checkpoint(path_of(rank)));
        SI_ASSIGN_OR_RETURN(StoredRun run, open_checkpoint(there));
        runs.push_back(std::move(run));
      }
      for (const StoredRun& run : runs) {
        for (const auto& device : run.devices) snapshots.push_back(device.get());
      }
      SI_ASSIGN_OR_RETURN(const auto stored, StoredTables::open(snapshots));
      EXPECT_TRUE(stored->whole());
      EXPECT_EQ(runs.front().tables->whole(), shared());
      SI_RETURN_IF_ERROR(updater.tables()->load_next(*stored));
      return updater.edit_state(nullptr, "after 3", {});
    });
    expect_records(reference_after(3));
    all([&](size_t rank, Updater& updater) { return step(rank, updater, 4); });
    expect_records(reference_after(4));
  }
}

TEST_P(RowRanksTest, ARowThatIsNotThereIsRefusedOnAll) {
  open_fresh(1);
  if (HasFatalFailure()) return;
  const Each said = each([&](size_t rank, Updater& updater) {
    const std::vector<int64_t> ids{1, rank == 1 ? int64_t{kRowsShared} : 2};
    std::vector<float> out(ids.size() * kDimShared);
    return updater.tables()->gather(0, ids, DataType::kF32, out.data());
  });
  for (const Status& status : said) {
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(status.to_string(), HasSubstr("rank 1: row 3000 in place 1"));
  }
  all([&](size_t rank, Updater& updater) { return step(rank, updater, 1); });
  expect_records(reference_after(1));
}

TEST_P(RowRanksTest, OtherTablesAreRefused) {
  board_ = std::make_shared<Board>(kTwoRanks);
  Each said(kTwoRanks);
  on_all_ranks(kTwoRanks, [&](size_t rank) {
    UpdaterOptions options = options_of(rank, 1);
    if (rank == 1) options.tables[0].rows += 1;
    said[rank] = Updater::open(options, space_of(rank)).status();
  });
  for (const Status& status : said) EXPECT_FALSE(status.ok());
  EXPECT_THAT(said[0].to_string(), HasSubstr("sparse_adam (state, 3001 x 10"));
}

TEST_P(RowRanksTest, ARankThatDiesLeavesOneStep) {
  open_fresh(1);
  if (HasFatalFailure()) return;
  all([&](size_t rank, Updater& updater) { return step(rank, updater, 1); });
  const uint64_t before = board_->calls(1);
  all([&](size_t rank, Updater& updater) { return step(rank, updater, 2); });
  const uint64_t calls = board_->calls(1) - before;
  ASSERT_GT(calls, 6u);
  uint64_t committed = 2;
  // At each of the first calls of a step, and at some of the others.
  for (uint64_t call = 0; call < calls; call += 1 + call / 6) {
    for (const Status& said : open(1)) ASSERT_TRUE(said.ok()) << said.to_string();
    board_->fail_at(1, board_->calls(1) + call, Board::Fault::kDies);
    const Each said =
        each([&](size_t rank, Updater& updater) { return step(rank, updater, committed + 1); });
    EXPECT_FALSE(said[1].ok());
    if (!said[0].ok()) {
      EXPECT_THAT(said[0].to_string(), HasSubstr("rank 1"));
    }
    for (const Status& opened : open(1)) ASSERT_TRUE(opened.ok()) << opened.to_string();
    const uint64_t now = ranks_[0]->committed_step();
    EXPECT_EQ(ranks_[1]->committed_step(), now);
    EXPECT_TRUE(now == committed || now == committed + 1) << now << " after " << committed;
    committed = now;
    expect_records(reference_after(committed));
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Runs, RowRanksTest, ::testing::Bool(),
                         [](const auto& one) { return one.param ? "Shared" : "OneEach"; });

}  // namespace
}  // namespace smartinf::engine
