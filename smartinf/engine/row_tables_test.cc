// Tables of rows over devices, beside a model of them in memory: the same bits for any number of
// devices, any cache and after every kind of ending.
#include "smartinf/engine/row_tables.h"

#include <filesystem>
#include <fstream>
#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/test_scratch.h"
#include "smartinf/engine/checkpoint.h"
#include "smartinf/engine/found_run.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/reshard.h"
#include "smartinf/engine/stored_run.h"
#include "smartinf/engine/test_model.h"
#include "smartinf/engine/test_row_model.h"
#include "smartinf/engine/updater.h"

namespace smartinf::engine {
namespace {

using base::ErrorCode;
using base::Status;
using kernels::RowRule;
using ::testing::HasSubstr;

constexpr uint64_t kRows = 5000;
constexpr uint32_t kDim = 24;

plan::ParameterSpace dense_space() {
  plan::ParameterSpace space;
  EXPECT_TRUE(space.add("dense", {4 * kBlock}, 0).ok());
  return space;
}

class RowTablesTest : public ::testing::Test {
 protected:
  RowTablesTest() {
    options_.memory_budget_bytes = 64 * base::kMiB;
    options_.subgroup_elements = kBlock;
    options_.gradient_type = DataType::kF32;
    options_.ring = storage::RingKind::kThreads;
    options_.pin_threads = false;
    options_.table_memory_bytes = 64 * base::kMiB;
    options_.table_log_bytes = 16 * base::kMiB;
    set_devices({1});
    for (const RowRule rule : {RowRule::kSparseAdam, RowRule::kAdamW, RowRule::kRowAdagrad}) {
      TableOptions table;
      table.name = kernels::row_rule_name(rule);
      table.rows = kRows;
      table.dim = kDim;
      table.rule.rule = rule;
      table.start = {0.02, 7};
      options_.tables.push_back(table);
    }
  }

  void set_devices(const std::vector<double>& bandwidths) {
    options_.devices.clear();
    for (size_t d = 0; d < bandwidths.size(); ++d) {
      DeviceOptions device;
      device.path = scratch_ / ("device" + std::to_string(options_.devices.size()));
      device.threads = 1;
      device.bandwidth = bandwidths[d];
      options_.devices.push_back(device);
    }
  }

  void open() {
    updater_.reset();
    auto opened = Updater::open(options_, dense_space());
    ASSERT_TRUE(opened.ok()) << opened.status().to_string();
    updater_ = std::move(*opened);
    ASSERT_NE(updater_->tables(), nullptr);
  }
  void initialize() {
    expect_ok(updater_->initialize(
        [](uint64_t, std::span<float> out) {
          std::ranges::fill(out, 0.5f);
          return Status();
        },
        "step 0"));
  }
  void open_fresh() {
    open();
    if (!HasFatalFailure()) initialize();
  }
  /// Leaves the step before its commit.
  void begin_update(uint64_t step) {
    expect_ok(updater_->begin_step());
    const std::vector<base::Bf16> dense = contract_gradient(4 * kBlock, static_cast<int>(step));
    expect_ok(updater_->put_gradient(0, dense.data(), DataType::kBf16, dense.size()));
    // Two micro batches.
    for (size_t t = 0; t < options_.tables.size(); ++t) {
      const Batch batch = batch_of(step * 8 + t, kRows, kDim, 700);
      const auto ids = std::span(batch.ids);
      expect_ok(updater_->tables()->add_gradient(t, ids.first(300), DataType::kF32,
                                                 batch.gradients.data()));
      expect_ok(updater_->tables()->add_gradient(t, ids.subspan(300), DataType::kF32,
                                                 batch.gradients.data() + 300 * kDim));
    }
    auto summary = updater_->finish_gradients(1);
    ASSERT_TRUE(summary.ok()) << summary.status().to_string();
    norms_.push_back(summary->norm);
    UpdateOptions update;
    update.gradient_scale = 0.5;
    update.groups = {{.lr = rate(step)}};
    expect_ok(updater_->start_update(update, DataType::kBf16, nullptr));
  }
  static double rate(uint64_t step) { return 0.01 / (1 + 0.1 * static_cast<double>(step)); }
  void step(uint64_t number, Reference* reference) {
    // What the next forward needs, some of it ahead.
    const Batch ahead = batch_of(number * 8, kRows, kDim, 700);
    expect_ok(updater_->tables()->prefetch(0, std::span(ahead.ids).first(200)));
    std::vector<float> out(ahead.ids.size() * kDim);
    expect_ok(updater_->tables()->gather(0, ahead.ids, DataType::kF32, out.data()));
    if (reference != nullptr) {
      EXPECT_EQ(out, reference->weights(0, ahead.ids)) << "step " << number;
    }
    begin_update(number);
    expect_ok(updater_->commit("after " + std::to_string(number)));
    if (reference == nullptr) return;
    for (size_t t = 0; t < options_.tables.size(); ++t) {
      const Batch batch = batch_of(number * 8 + t, kRows, kDim, 700);
      reference->step(t, batch.ids, batch.gradients, number, rate(number), 0.5);
    }
  }
  void expect_records(const Reference& reference) {
    for (size_t t = 0; t < options_.tables.size(); ++t) {
      uint64_t bad = 0;
      expect_ok(updater_->tables()->read_records(
          t, 0, kRows, [&](uint64_t first, std::span<const std::byte> records) {
            const size_t bytes = reference.record(t, 0).size();
            for (size_t i = 0; i * bytes < records.size(); ++i) {
              const auto there = records.subspan(i * bytes, bytes);
              bad += std::ranges::equal(there, reference.record(t, first + i)) ? 0 : 1;
            }
            return Status();
          }));
      EXPECT_EQ(bad, 0u) << "records of " << options_.tables[t].name;
    }
  }

  Scratch scratch_;
  UpdaterOptions options_;
  std::unique_ptr<Updater> updater_;
  std::vector<double> norms_;
};

TEST_F(RowTablesTest, HaveTheBitsOfMemoryForAnyDevicesAndCache) {
  std::vector<double> first_norms;
  for (const std::vector<double>& bandwidths :
       {std::vector<double>{1}, std::vector<double>{1, 1}, std::vector<double>{3, 1, 2, 2}}) {
    for (const uint64_t memory : {24 * base::kMiB, 64 * base::kMiB}) {
      SCOPED_TRACE(std::to_string(bandwidths.size()) + " devices, " + std::to_string(memory));
      for (const DeviceOptions& device : options_.devices) {
        std::filesystem::remove_all(device.path);
      }
      set_devices(bandwidths);
      options_.table_memory_bytes = memory * bandwidths.size();
      norms_.clear();
      open_fresh();
      ASSERT_FALSE(HasFatalFailure());
      Reference reference(options_.tables);
      for (uint64_t number = 1; number <= 6; ++number) {
        step(number, &reference);
        ASSERT_FALSE(HasFailure());
      }
      expect_records(reference);
      if (first_norms.empty()) first_norms = norms_;
      EXPECT_EQ(norms_, first_norms);
    }
  }
}

TEST_F(RowTablesTest, ComeBackAsOfTheCommittedStep) {
  set_devices({1, 1});
  options_.table_log_bytes = 4 * base::kMiB;  // merges go on
  open();
  ASSERT_FALSE(HasFatalFailure());
  Reference reference(options_.tables);
  std::vector<int64_t> ids;
  std::vector<float> values;
  for (int64_t row = 0; row < static_cast<int64_t>(kRows); row += 3) {
    ids.push_back(row);
    for (uint32_t d = 0; d < kDim; ++d) values.push_back(static_cast<float>(row) + 0.25f);
  }
  expect_ok(updater_->tables()->put(1, ids, values));
  for (size_t i = 0; i < ids.size(); ++i) {
    reference.put(1, static_cast<uint64_t>(ids[i]), std::span(values).subspan(i * kDim, kDim));
  }
  initialize();
  for (uint64_t number = 1; number <= 12; ++number) {
    if (number == 4) {  // a step that is made again
      begin_update(number);
      expect_ok(updater_->abort());
      expect_records(reference);
    }
    step(number, &reference);
    if (number % 3 == 0) {
      if (number == 6) begin_update(number + 1);  // is lost
      open();
      ASSERT_FALSE(HasFatalFailure());
      EXPECT_EQ(updater_->committed_step(), number);
      EXPECT_EQ(updater_->client_metadata(), "after " + std::to_string(number));
      expect_records(reference);
    }
    ASSERT_FALSE(HasFailure()) << "step " << number;
  }
}

TEST_F(RowTablesTest, ComeBackFromACheckpointOnOtherDevices) {
  set_devices({1, 1});
  options_.table_log_bytes = 4 * base::kMiB;  // merges go on
  open();
  ASSERT_FALSE(HasFatalFailure());
  Reference reference(options_.tables);
  const std::vector<int64_t> put{1, 4000};
  const std::vector<float> values(2 * kDim, 0.75f);
  expect_ok(updater_->tables()->put(1, put, values));
  for (const int64_t row : put) {
    reference.put(1, static_cast<uint64_t>(row), std::span(values).first(kDim));
  }
  initialize();
  for (uint64_t number = 1; number <= 3; ++number) step(number, &reference);
  expect_ok(updater_->flush());
  CheckpointOptions checkpoint;
  checkpoint.folder = scratch_ / "checkpoints";
  const auto written = write_checkpoint(*updater_, checkpoint);
  ASSERT_TRUE(written.ok()) << written.status().to_string();
  const Reference at_checkpoint = reference;
  for (uint64_t number = 4; number <= 6; ++number) step(number, &reference);
  expect_records(reference);
  updater_.reset();
  const auto found = find_run(sources_at({options_.devices[0].path, options_.devices[1].path}));
  ASSERT_TRUE(found);
  EXPECT_EQ(found->client_metadata, "after 6");

  const auto restore = [&](const std::vector<double>& bandwidths, bool replace) -> Status {
    SI_ASSIGN_OR_RETURN(const Checkpoint made, read_checkpoint(written->path));
    SI_ASSIGN_OR_RETURN(StoredRun run, open_checkpoint(made));
    std::vector<std::string> paths;
    for (const DeviceOptions& device : options_.devices) paths.push_back(device.path);
    ReshardOptions options;
    options.format = run.layout().format;
    options.bandwidths = bandwidths;
    options.replace = replace;
    return reshard(run, sources_at(paths, storage::RingKind::kThreads), options).status();
  };
  const auto go_on = [&] {
    open();
    ASSERT_FALSE(HasFatalFailure());
    EXPECT_EQ(updater_->committed_step(), 3u);
    EXPECT_EQ(updater_->client_metadata(), "after 3");
    reference = at_checkpoint;
    expect_records(reference);
    for (uint64_t number = 4; number <= 6; ++number) step(number, &reference);
    expect_records(reference);
    updater_.reset();
  };
  // In the place of the state that went on; then as a crash leaves it before the names are changed.
  expect_ok(restore({}, true));
  const std::filesystem::path folder = options_.devices[0].path;
  std::filesystem::rename(folder / "smartinf.rows", folder / "smartinf.rows.new");
  std::filesystem::copy(std::filesystem::path(options_.devices[1].path) / "smartinf.rows",
                        folder / "smartinf.rows");
  go_on();
  ASSERT_FALSE(HasFailure());
  EXPECT_FALSE(std::filesystem::exists(folder / "smartinf.rows.new"));
  // Into a run that has gone on, in a step of its own; one that fails leaves it as it is.
  open();
  ASSERT_FALSE(HasFatalFailure());
  const auto load = [&](bool fails) {
    const auto made = read_checkpoint(written->path);
    ASSERT_TRUE(made.ok());
    auto run = open_checkpoint(*made);
    ASSERT_TRUE(run.ok()) << run.status().to_string();
    expect_ok(updater_->tables()->load_next(*run->tables));
    ElementReader reader(*run);
    const Status edited = updater_->edit_state(
        [&](uint64_t first, std::span<const std::span<float>> planes) -> base::Result<bool> {
          if (fails) return Status(ErrorCode::kCancelled, "no");
          for (size_t p = 0; p < planes.size(); ++p) {
            SI_RETURN_IF_ERROR(reader.read(p, first, planes[p]));
          }
          return true;
        },
        "loaded");
    EXPECT_EQ(edited.ok(), !fails) << edited.to_string();
  };
  load(true);
  expect_records(reference);
  load(false);
  reference = at_checkpoint;
  expect_records(reference);
  open();
  ASSERT_FALSE(HasFatalFailure());
  step(8, &reference);
  open();
  ASSERT_FALSE(HasFatalFailure());
  expect_records(reference);
  updater_.reset();

  // With other shares of rows.
  for (const std::vector<double>& bandwidths : {std::vector<double>{1}, {2, 1, 1}}) {
    for (const DeviceOptions& device : options_.devices) {
      std::filesystem::remove_all(device.path);
    }
    set_devices(bandwidths);
    expect_ok(restore(bandwidths, false));
    go_on();
    ASSERT_FALSE(HasFailure()) << bandwidths.size() << " devices";
  }

  // What is not all there is not taken for it.
  for (const DeviceOptions& device : options_.devices) std::filesystem::remove_all(device.path);
  set_devices({1});
  const std::filesystem::path rows = std::filesystem::path(written->path) / "device-1";
  std::filesystem::rename(rows / "smartinf.rows", rows / "kept");
  const Status missing = restore({}, false);
  EXPECT_EQ(missing.code(), ErrorCode::kNotFound) << missing.to_string();
  EXPECT_THAT(missing.to_string(), HasSubstr("sparse_adam and "));
  std::filesystem::copy(rows / ".." / "device-0" / "smartinf.rows", rows / "smartinf.rows");
  EXPECT_EQ(restore({}, false).code(), ErrorCode::kMismatch);
  std::filesystem::rename(rows / "kept", rows / "smartinf.rows");
  // A bit of a row that this device has.
  std::fstream file(rows / "smartinf.rows", std::ios::in | std::ios::out | std::ios::binary);
  const std::string content((std::istreambuf_iterator<char>(file)), {});
  size_t weight = std::string::npos;
  for (uint64_t row = 0; weight == std::string::npos && row < kRows; ++row) {
    const std::vector<std::byte>& record = at_checkpoint.record(0, row);
    if (kernels::record_step(record) == 0) continue;
    weight =
        content.find(std::string_view(reinterpret_cast<const char*>(record.data()), record.size()));
  }
  ASSERT_NE(weight, std::string::npos);
  file.clear();
  file.seekp(static_cast<std::streamoff>(weight));
  file.put(static_cast<char>(content[weight] ^ 1));
  file.close();
  const Status damaged = restore({}, false);
  EXPECT_EQ(damaged.code(), ErrorCode::kCorrupt) << damaged.to_string();
  EXPECT_THAT(damaged.to_string(), HasSubstr("sparse_adam"));
  EXPECT_FALSE(
      std::filesystem::exists(std::filesystem::path(options_.devices[0].path) / "smartinf.state"));
}

// A step of a third of the log: what the device merges between steps is not enough for the next.
TEST_F(RowTablesTest, StepsBackToBackFindRoomInTheLog) {
  options_.table_log_bytes = 8 * base::kMiB;
  open_fresh();
  ASSERT_FALSE(HasFatalFailure());
  std::vector<int64_t> ids(3000);
  std::iota(ids.begin(), ids.end(), 0);
  const std::vector<float> gradients(ids.size() * kDim, 0.25f);
  Reference reference(options_.tables);
  for (uint64_t number = 1; number <= 12; ++number) {
    expect_ok(updater_->begin_step());
    const std::vector<base::Bf16> dense = contract_gradient(4 * kBlock, static_cast<int>(number));
    expect_ok(updater_->put_gradient(0, dense.data(), DataType::kBf16, dense.size()));
    for (size_t t = 0; t < options_.tables.size(); ++t) {
      expect_ok(updater_->tables()->add_gradient(t, ids, DataType::kF32, gradients.data()));
      reference.step(t, ids, gradients, number, rate(number), 1);
    }
    ASSERT_TRUE(updater_->finish_gradients(1).ok());
    UpdateOptions update;
    update.groups = {{.lr = rate(number)}};
    expect_ok(updater_->start_update(update, DataType::kBf16, nullptr));
    expect_ok(updater_->commit("after " + std::to_string(number)));
    ASSERT_FALSE(HasFailure()) << "step " << number;
  }
  expect_records(reference);
}

TEST_F(RowTablesTest, BadInputIsRefusedByName) {
  open_fresh();
  ASSERT_FALSE(HasFatalFailure());
  RowTables& tables = *updater_->tables();
  std::vector<float> out(3 * kDim);
  const std::vector<int64_t> outside{1, 2, static_cast<int64_t>(kRows)};
  const Status status = tables.gather(0, outside, DataType::kF32, out.data());
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(status.to_string(), HasSubstr("row 5000 in place 2"));
  EXPECT_THAT(tables.find("none").status().to_string(), HasSubstr("sparse_adam, adamw"));
  EXPECT_EQ(tables.put(0, std::vector<int64_t>{1}, std::vector<float>(kDim)).code(),
            ErrorCode::kFailedPrecondition);

  expect_ok(updater_->begin_step());
  const std::vector<base::Bf16> dense = contract_gradient(4 * kBlock, 1);
  expect_ok(updater_->put_gradient(0, dense.data(), DataType::kBf16, dense.size()));
  std::vector<float> gradient(2 * kDim, 1.0f);
  gradient[kDim + 3] = std::numeric_limits<float>::infinity();
  expect_ok(tables.add_gradient(2, std::vector<int64_t>{11, 42}, DataType::kF32, gradient.data()));
  const auto summary = updater_->finish_gradients(1);
  ASSERT_TRUE(summary.ok());
  EXPECT_FALSE(summary->finite);
  EXPECT_EQ(summary->first_bad, "row_adagrad, row 42");
  expect_ok(updater_->abort());

  updater_.reset();
  options_.tables[0].dim = 16;
  const auto other = Updater::open(options_, dense_space());
  EXPECT_EQ(other.status().code(), ErrorCode::kMismatch);
  EXPECT_THAT(other.status().to_string(), HasSubstr("5000 rows of 24"));
  EXPECT_THAT(other.status().to_string(), HasSubstr("5000 rows of 16"));
}

TEST_F(RowTablesTest, ScratchIsWrittenAndAddedTo) {
  TableOptions scratch;
  scratch.name = "activations";
  scratch.kind = storage::RowTableKind::kScratch;
  scratch.rows = 1000;
  scratch.dim = 8;
  options_.tables.push_back(scratch);
  open_fresh();
  ASSERT_FALSE(HasFatalFailure());
  RowTables& tables = *updater_->tables();
  std::vector<float> values(3 * 8);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const std::vector<int64_t> ids{999, 5, 999};
  expect_ok(tables.put(3, std::vector<int64_t>{5, 6}, std::vector<float>(16, 1.0f)));
  expect_ok(tables.scatter_add(3, ids, values));
  std::vector<float> out(3 * 8);
  expect_ok(tables.gather(3, std::vector<int64_t>{5, 6, 999}, DataType::kF32, out.data()));
  for (size_t d = 0; d < 8; ++d) {
    EXPECT_EQ(out[d], 1.0f + static_cast<float>(8 + d));
    EXPECT_EQ(out[8 + d], 1.0f);
    EXPECT_EQ(out[16 + d], static_cast<float>(d) + static_cast<float>(16 + d));
  }
}

TEST_F(RowTablesTest, MemoryIsThatOfTheLogWhichTheFileHas) {
  options_.tables.resize(1);
  options_.tables[0].rows = 1'000'000;
  options_.tables[0].dim = 1;
  options_.tables[0].rule.rule = RowRule::kRowAdagrad;
  options_.table_log_bytes = 64 * base::kMiB;
  options_.table_memory_bytes = 256 * base::kMiB;
  open_fresh();
  updater_.reset();
  options_.table_log_bytes = 2 * base::kMiB;  // the file keeps its own
  options_.table_memory_bytes = 30 * base::kMiB;
  const Status refused = Updater::open(options_, dense_space()).status();
  EXPECT_EQ(refused.code(), ErrorCode::kOutOfMemory) << refused.to_string();
  options_.table_memory_bytes = 256 * base::kMiB;
  open();
}

}  // namespace
}  // namespace smartinf::engine
