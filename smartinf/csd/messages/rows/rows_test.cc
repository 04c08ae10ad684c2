// Row tables of every kind of device: rows come back as they were updated, with the step that the
// device has committed, and nothing but rows crosses the link.
#include "smartinf/csd/messages/rows/rows.h"

#include "tests/device_contract/contract.h"

namespace smartinf::csd {
namespace {

using base::ErrorCode;

constexpr uint32_t kDim = 24;
constexpr uint32_t kRows = 4000;

class DeviceRows : public DeviceContract {
 protected:
  void SetUp() override {
    DeviceContract::SetUp();
    row_memory_bytes_ = 48 * base::kMiB;
    row_bytes_ = 64 * base::kMiB;
    before_start_ = [this] { opened_ = run(open_message(true)); };
    kernels::RowOptions options;
    rule_ = options;
    records_.assign(kRows, std::vector<std::byte>(kernels::record_bytes(rule_.rule, kDim)));
    for (uint32_t row = 0; row < kRows; ++row) {
      kernels::initial_record({0.5, 3}, 0, row, kDim, records_[row]);
    }
  }
  static OpenTables open_message(bool create) {
    OpenTables open;
    TableShape& table = open.tables.emplace_back();
    table.name = "words";
    table.dim = kDim;
    table.rows = kRows;
    table.start = {0.5, 3};
    TableShape& scratch = open.tables.emplace_back();
    scratch.name = "sums";
    scratch.kind = storage::RowTableKind::kScratch;
    scratch.dim = kDim;
    scratch.rows = 100;
    open.pattern = {0};
    open.log_bytes = 4 * base::kMiB;
    open.create = create;
    return open;
  }
  bool refused() const {
    return GetParam().other_processor || GetParam().durability == storage::Durability::kNone;
  }
  void create_with_tables() {
    create();
    ASSERT_FALSE(HasFatalFailure());
    ASSERT_TRUE(opened_.ok()) << opened_.to_string();
  }
  void open_again() {
    open();
    ASSERT_FALSE(HasFatalFailure());
    const Status status = run(open_message(false));
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
  static std::vector<uint32_t> rows_of(uint64_t step) {
    std::mt19937_64 random(step);
    std::vector<uint32_t> rows;
    for (uint32_t row = static_cast<uint32_t>(random() % 7); row < kRows;
         row += 1 + static_cast<uint32_t>(random() % 40)) {
      rows.push_back(row);
    }
    return rows;
  }
  /// Updates rows in the step that has begun. count: whether the model of it does, too.
  void update_rows(uint64_t number, bool count) {
    const std::vector<uint32_t> rows = rows_of(number);
    std::vector<float> gradients(rows.size() * kDim);
    std::mt19937 random(static_cast<uint32_t>(number));
    std::normal_distribution<float> normal(0, 1);
    for (float& value : gradients) value = normal(random);
    UpdateRows update;
    update.scalars = kernels::make_row_scalars(rule_, 0.01, number, 0.5);
    update.rows = row_bytes(rows);
    update.gradients = std::as_bytes(std::span(gradients));
    const Status status = run(update);
    ASSERT_TRUE(status.ok()) << status.to_string();
    for (size_t i = 0; count && i < rows.size(); ++i) {
      kernels::update_record(update.scalars, std::span(gradients).subspan(i * kDim, kDim),
                             records_[rows[i]]);
    }
  }
  void expect_rows() {
    std::vector<uint32_t> rows(kRows);
    for (uint32_t row = 0; row < kRows; ++row) rows[row] = row;
    std::vector<float> weights(kRows * kDim);
    GatherRows gather;
    gather.rows = row_bytes(rows);
    gather.out = std::as_writable_bytes(std::span(weights));
    const Status status = run(gather);
    ASSERT_TRUE(status.ok()) << status.to_string();
    uint32_t wrong = 0;
    for (uint32_t row = 0; row < kRows; ++row) {
      const auto* expected = reinterpret_cast<const float*>(records_[row].data());
      wrong += std::equal(expected, expected + kDim, weights.begin() + row * kDim) ? 0 : 1;
    }
    EXPECT_EQ(wrong, 0u);
  }

  kernels::RowOptions rule_;
  std::vector<std::vector<std::byte>> records_;
  Status opened_;
};

TEST_P(DeviceRows, AreOfTheStepThatTheBlocksAreOf) {
  if (refused()) {
    create();
    EXPECT_EQ(opened_.code(), ErrorCode::kUnsupported) << opened_.to_string();
    return;
  }
  create_with_tables();
  ASSERT_FALSE(HasFatalFailure());
  expect_rows();
  for (uint64_t number = 1; number <= 3; ++number) {
    step(number);
    update_rows(number, true);
    expect_rows();  // of the step that is not committed
    finish_step(number);
    expect_rows();
    ASSERT_FALSE(HasFailure()) << "step " << number;
  }
  // A step that is forgotten.
  step(4);
  update_rows(4, false);
  ASSERT_TRUE(run(Abort{4}).ok());
  expect_rows();
  // One that is lost.
  step(4);
  update_rows(4, false);
  open_again();
  ASSERT_FALSE(HasFatalFailure());
  expect_rows();
  step(4);
  update_rows(4, true);
  finish_step(4);
  expect_rows();
}

TEST_P(DeviceRows, CrossTheLinkAndPagesDoNot) {
  if (refused()) return;
  create_with_tables();
  ASSERT_FALSE(HasFatalFailure());
  step(1);
  const base::TrafficReading before = device_->host_traffic();
  update_rows(1, true);
  const std::vector<uint32_t> rows = rows_of(2);
  std::vector<base::Bf16> weights(rows.size() * kDim);
  GatherRows gather;
  gather.type = base::DataType::kBf16;
  gather.rows = row_bytes(rows);
  gather.out = std::as_writable_bytes(std::span(weights));
  ASSERT_TRUE(run(gather).ok());
  const base::TrafficReading moved = device_->host_traffic().since(before);
  if (GetParam().place == HostLinkPlace::kAtStore) return;
  const uint64_t updated = rows_of(1).size();
  EXPECT_EQ(moved.up_total(), rows.size() * kDim * 2);
  EXPECT_EQ(moved.down_total(), updated * (kDim * 4 + 4) + rows.size() * 4);
}

TEST_P(DeviceRows, OfScratchAreAddedTo) {
  if (refused()) return;
  create_with_tables();
  ASSERT_FALSE(HasFatalFailure());
  const std::vector<uint32_t> rows{3, 99};
  std::vector<float> values(2 * kDim, 1.5f);
  const auto bytes = std::as_bytes(std::span(values));
  ASSERT_TRUE(run(ScatterAddRows{1, row_bytes(rows), bytes}).ok());
  ASSERT_TRUE(run(ScatterAddRows{1, row_bytes(rows), bytes}).ok());
  ASSERT_TRUE(
      run(PutRows{1, false, row_bytes(std::span(rows).first(1)), bytes.first(kDim * sizeof(float))})
          .ok());
  std::vector<float> out(2 * kDim);
  GatherRows gather;
  gather.table = 1;
  gather.rows = row_bytes(rows);
  gather.out = std::as_writable_bytes(std::span(out));
  ASSERT_TRUE(run(gather).ok());
  EXPECT_EQ(out[0], 1.5f);
  EXPECT_EQ(out[kDim], 3.0f);
}

TEST_P(DeviceRows, BadMessagesAreRefused) {
  if (refused()) return;
  create_with_tables();
  ASSERT_FALSE(HasFatalFailure());
  std::vector<float> out(2 * kDim);
  const auto gather = [&](uint32_t table, const std::vector<uint32_t>& rows, size_t floats) {
    GatherRows message;
    message.table = table;
    message.rows = row_bytes(rows);
    message.out = std::as_writable_bytes(std::span(out).first(floats));
    return run(message).code();
  };
  EXPECT_EQ(gather(0, {1, kRows}, 2 * kDim), ErrorCode::kInvalidArgument);
  EXPECT_EQ(gather(0, {2, 1}, 2 * kDim), ErrorCode::kInvalidArgument);
  EXPECT_EQ(gather(0, {1, 1}, 2 * kDim), ErrorCode::kInvalidArgument);
  EXPECT_EQ(gather(2, {1, 2}, 2 * kDim), ErrorCode::kInvalidArgument);
  EXPECT_EQ(gather(0, {1, 2}, kDim), ErrorCode::kInvalidArgument);
  EXPECT_EQ(gather(0, {1, 2}, 2 * kDim), ErrorCode::kOk);
  const std::vector<uint32_t> rows{1};
  const auto values = std::as_bytes(std::span(out).first(kDim));
  EXPECT_EQ(run(PutRows{0, false, row_bytes(rows), values}).code(), ErrorCode::kFailedPrecondition);
  EXPECT_EQ(run(ScatterAddRows{0, row_bytes(rows), values}).code(), ErrorCode::kInvalidArgument);
  UpdateRows update;
  update.scalars = kernels::make_row_scalars(rule_, 0.01, 1, 1);
  update.rows = row_bytes(rows);
  update.gradients = values;
  EXPECT_EQ(run(update).code(), ErrorCode::kFailedPrecondition);  // in no step
  EXPECT_EQ(run(open_message(false)).code(), ErrorCode::kFailedPrecondition);
  step(1);
  update_rows(1, true);
  finish_step(1);
  expect_rows();
}

TEST_P(DeviceRows, OtherTablesAreNamed) {
  if (refused()) return;
  create_with_tables();
  ASSERT_FALSE(HasFatalFailure());
  open();
  ASSERT_FALSE(HasFatalFailure());
  OpenTables other = open_message(false);
  other.tables[0].rows = kRows + 1;
  const Status status = run(other);
  EXPECT_EQ(status.code(), ErrorCode::kMismatch);
  EXPECT_NE(status.to_string().find("4000 rows"), std::string::npos) << status.to_string();
  EXPECT_NE(status.to_string().find("4001 rows"), std::string::npos) << status.to_string();
  // Without its tables a run goes on, and keeps them.
  step(1);
  finish_step(1);
  open_again();
  ASSERT_FALSE(HasFatalFailure());
  expect_rows();
}

INSTANTIATE_TEST_SUITE_P(Kinds, DeviceRows, testing::ValuesIn([] {
                           std::vector<Kind> all = kinds();
                           std::erase_if(all, [](const Kind& kind) { return kind.fake; });
                           return all;
                         }()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace smartinf::csd
