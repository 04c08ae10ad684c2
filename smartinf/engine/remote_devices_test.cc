// The engine over devices of a server, alone and beside this machine's own: the same bits, and
// their states can be copied, checked and brought back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/engine/checkpoint.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/reshard.h"
#include "smartinf/engine/row_tables.h"
#include "smartinf/engine/stored_run.h"
#include "smartinf/engine/test_model.h"
#include "smartinf/engine/test_row_model.h"
#include "smartinf/serve/test_server.h"

namespace smartinf::engine {
namespace {

using base::Status;

constexpr uint64_t kQuotaBytes = 48 * base::kMiB;

class RemoteDevices : public testing::Test {
 protected:
  RemoteDevices() {
    std::vector<serve::ServedDevice> devices;
    for (const char* name : {"fast0", "fast1", "small"}) {
      serve::ServedDevice& served = devices.emplace_back();
      served.name = name;
      if (name == std::string("small")) served.quota_bytes = kQuotaBytes;
      served.memory_bytes = uint64_t{1} << 30;
      const std::string path = scratch_ / name;
      served.source =
          [path, name](
              const csd::SourceWishes& wishes) -> base::Result<std::unique_ptr<csd::DeviceSource>> {
        UpdaterOptions options;
        DeviceOptions& device = options.devices.emplace_back();
        device.path = path;
        device.name = name;
        device.threads = 2;
        device.bandwidth = 1;
        options.gradient_type = wishes.gradient_type;
        options.schedule = wishes.schedule;
        options.durability = wishes.durability;
        options.checksums = wishes.checksums;
        options.io_bytes = base::kMiB;
        options.io_depth = 4;
        return std::move(local_sources(options).front());
      };
    }
    server_ = serve::wire::start_test_server(serve::wire::test_server_options(std::move(devices)));
    options_ = options_of(Variant{}, scratch_);
    options_.remote = serve::wire::TestTrust::shared().options();
  }
  std::string url(const char* name) const {
    return fmt::format("grpc://localhost:{}/{}", server_->port(), name);
  }
  void add_remote(const char* name, double bandwidth) {
    DeviceOptions& device = options_.devices.emplace_back();
    device.path = url(name);
    device.bandwidth = bandwidth;
  }
  std::unique_ptr<Updater> open() {
    auto updater = Updater::open(options_, contract_space());
    EXPECT_TRUE(updater.ok()) << updater.status().to_string();
    return updater.ok() ? std::move(*updater) : nullptr;
  }
  DeviceSources sources(const std::vector<std::string>& places) const {
    return sources_at(places, storage::RingKind::kAuto, options_.remote);
  }

  const Scratch scratch_;
  std::unique_ptr<serve::Server> server_;
  UpdaterOptions options_;
};

TEST_F(RemoteDevices, BesideLocalOnesTheBitsAreTheSame) {
  add_remote("fast0", 2);
  add_remote("fast1", 0.5);
  Outcome outcome;
  {
    const auto updater = open();
    ASSERT_NE(updater, nullptr);
    initialize(*updater);
    run_steps(*updater, 1, 2, outcome);
  }
  {
    const auto updater = open();  // found again
    ASSERT_NE(updater, nullptr);
    EXPECT_FALSE(updater->fresh());
    run_steps(*updater, 3, kSteps, outcome);
  }
  EXPECT_EQ(outcome, reference(DataType::kBf16));
}

TEST_F(RemoteDevices, StatesAreCopiedThereAndBack) {
  options_.devices.clear();
  add_remote("fast0", 1);
  Outcome outcome;
  {
    const auto updater = open();
    ASSERT_NE(updater, nullptr);
    initialize(*updater);
    run_steps(*updater, 1, 1, outcome);
    // The state is that of the open device.
    auto run = updater->snapshot();
    ASSERT_TRUE(run.ok()) << run.status().to_string();
    CheckpointOptions checkpoint;
    checkpoint.folder = scratch_ / "checkpoints";
    const auto made = write_checkpoint(*run, checkpoint);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
  }
  // To another device of the server, and in place of what is there.
  for (const char* target : {"fast1", "fast1"}) {
    auto run = open_stored_run(sources({url("fast0")}), storage::ReaderLock::kTake);
    ASSERT_TRUE(run.ok()) << run.status().to_string();
    ReshardOptions reshard_options;
    reshard_options.memory_budget_bytes = 64 * base::kMiB;
    reshard_options.format = StateFormat::kF32;
    reshard_options.replace = true;
    const auto moved = reshard(*run, sources({url(target)}), reshard_options);
    ASSERT_TRUE(moved.ok()) << moved.status().to_string();
  }
  uint64_t faults = 0;
  const auto report =
      sources({url("fast1")}).front()->check({}, [&](const storage::StoreFault&) { ++faults; });
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(faults, 0u);
  EXPECT_GT(report->blocks_checked, 0u);
  options_.devices.clear();
  add_remote("fast1", 1);
  const auto updater = open();
  ASSERT_NE(updater, nullptr);
  EXPECT_EQ(updater->committed_step(), 1u);
  run_steps(*updater, 2, kSteps, outcome);
  EXPECT_EQ(outcome, reference(DataType::kBf16));
}

/// One step, in which both tables get gradients.
void step_with_tables(Updater& updater, uint64_t seed) {
  expect_ok(updater.begin_step());
  const auto gradient = contract_gradient(contract_space().count(), static_cast<int>(seed));
  expect_ok(updater.put_gradient(0, gradient.data(), DataType::kBf16, gradient.size()));
  for (size_t t = 0; t < updater.tables()->count(); ++t) {
    const engine::TableOptions& table = updater.tables()->table(t);
    const Batch batch = batch_of(seed, table.rows, table.dim, 500);
    expect_ok(updater.tables()->add_gradient(t, batch.ids, DataType::kF32, batch.gradients.data()));
  }
  expect_ok(updater.finish_gradients(1).status());
  UpdateOptions update;
  update.groups.resize(contract_space().group_count(), {.lr = 1e-2});
  expect_ok(
      updater.start_update(update, DataType::kBf16, [](uint64_t) -> void* { return nullptr; }));
  expect_ok(updater.commit("a step"));
}
std::vector<std::byte> records_of(Updater& updater) {
  std::vector<std::byte> all;
  for (size_t t = 0; t < updater.tables()->count(); ++t) {
    expect_ok(updater.tables()->read_records(
        t, 0, updater.tables()->table(t).rows, [&](uint64_t, std::span<const std::byte> records) {
          all.insert(all.end(), records.begin(), records.end());
          return Status();
        }));
  }
  return all;
}

TEST_F(RemoteDevices, TablesGoWithTheirState) {
  for (const auto rule : {kernels::RowRule::kSparseAdam, kernels::RowRule::kAdamW}) {
    TableOptions table;
    table.name = kernels::row_rule_name(rule);
    table.rows = 3000;
    table.dim = 24;
    table.rule.rule = rule;
    table.start = {0.02, 7};
    options_.tables.push_back(table);
  }
  options_.table_log_bytes = 4 * base::kMiB;
  CheckpointOptions checkpoint;
  checkpoint.path = scratch_ / "checkpoint";
  options_.devices.clear();
  add_remote("fast0", 1);
  std::vector<std::byte> records;
  {
    const auto updater = open();
    ASSERT_NE(updater, nullptr);
    initialize(*updater);
    step_with_tables(*updater, 1);
    step_with_tables(*updater, 2);
    expect_ok(write_checkpoint(*updater, checkpoint).status());
    step_with_tables(*updater, 3);
    records = records_of(*updater);
  }
  // From the server's folder to another device of it, and from the checkpoint back.
  const std::string folder = scratch_ / "local";
  const auto made = read_checkpoint(checkpoint.path);
  ASSERT_TRUE(made.ok()) << made.status().to_string();
  struct Copy {
    DeviceSources from;
    std::string to;
  };
  std::vector<Copy> copies;
  copies.push_back({sources({url("fast0")}), url("fast1")});
  copies.push_back({sources({url("fast0")}), folder});
  for (const Copy& copy : copies) {
    auto run = open_stored_run(copy.from, storage::ReaderLock::kTake);
    ASSERT_TRUE(run.ok()) << run.status().to_string();
    expect_ok(reshard(*run, sources({copy.to}), {}).status());
  }
  auto stored = open_checkpoint(*made);
  ASSERT_TRUE(stored.ok()) << stored.status().to_string();
  ReshardOptions replace;
  replace.replace = true;
  expect_ok(reshard(*stored, sources({url("fast0")}), replace).status());
  std::vector<std::byte> next;
  for (const std::string& place : {url("fast1"), folder, url("fast0")}) {
    options_.devices.front().path = place;
    const auto updater = open();
    ASSERT_NE(updater, nullptr);
    if (place == url("fast0"))
      step_with_tables(*updater, 3);  // the checkpoint is of the step before
    EXPECT_TRUE(records_of(*updater) == records) << place;
    step_with_tables(*updater, 4);
    if (next.empty()) next = records_of(*updater);
    EXPECT_TRUE(records_of(*updater) == next) << place;
  }
}

TEST_F(RemoteDevices, TablesCountInTheQuota) {
  TableOptions& table = options_.tables.emplace_back();
  table.name = "rows";
  table.rows = 100'000;
  table.dim = 24;
  options_.table_log_bytes = 4 * base::kMiB;
  options_.devices.clear();
  add_remote("small", 1);
  const Status refused = Updater::open(options_, contract_space()).status();
  EXPECT_EQ(refused.code(), base::ErrorCode::kNoSpace);
  EXPECT_THAT(refused.to_string(), testing::HasSubstr("the tables need"));
  table.rows = 10'000;
  EXPECT_NE(open(), nullptr);
}

TEST_F(RemoteDevices, WhatTheyCannotDoIsRefused) {
  add_remote("fast0", 1);
  options_.where = UpdateWhere::kHost;
  const Status refused = Updater::open(options_, contract_space()).status();
  EXPECT_EQ(refused.code(), base::ErrorCode::kUnsupported);
  EXPECT_THAT(refused.to_string(), testing::HasSubstr("fast0"));
}

}  // namespace
}  // namespace smartinf::engine
