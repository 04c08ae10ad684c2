// Tests of a device with compressed gradients and with a residual.
#include "tests/device_contract/contract.h"

namespace smartinf::csd {
namespace {

std::vector<Kind> compressed_kinds() {
  std::vector<Kind> all = kinds();
  std::erase_if(all, [](const Kind& kind) {
    return kind.fake || kind.spill || kind.place == HostLinkPlace::kAtStore ||
           kind.name == "early" || kind.name == "many_slots" || kind.name == "five_threads" ||
           (kind.cached > 0 && kind.name != "half_in_memory");
  });
  for (size_t i = 0; i < all.size(); ++i) {
    all[i].sparsity = {97, all[i].name != "naive" && all[i].name != "scratch"};
  }
  // Signs arrive as bf16, whatever the device's own type.
  for (const bool factors : {false, true}) {
    Kind signs;
    signs.name = factors ? "signs_with_factors" : "signs";
    signs.sparsity = {97, factors, true};
    all.push_back(signs);
  }
  return all;
}

compress::ValueEncoding form_of(DataType type) {
  for (const compress::ValueEncoding encoding :
       {compress::ValueEncoding::kF32, compress::ValueEncoding::kF16}) {
    if (compress::expanded_type(encoding) == type) return encoding;
  }
  return compress::ValueEncoding::kBf16;
}

class CompressedContract : public DeviceContract {
 protected:
  compress::RowColumnFactors factors(const storage::StoredSubgroup& subgroup, uint64_t step) const {
    const TestSparsity& sparsity = GetParam().sparsity;
    return sparsity.factors ? test_factors(matrices_, subgroup, step)
                            : compress::RowColumnFactors();
  }
  std::vector<std::byte> message(const storage::StoredSubgroup& subgroup, uint64_t step) const {
    const Kind& kind = GetParam();
    const auto gradient = test_gradient(subgroup, step, kind.gradient_type);
    std::vector<float> wide(subgroup.count);
    kernels::kernels().cast_to_f32(gradient.data(), kind.gradient_type, wide.data(), wide.size());
    compress::CompressedWriter writer;
    writer.begin(subgroup.id, subgroup.count,
                 kind.sparsity.signs ? compress::ValueEncoding::kSign : form_of(kind.gradient_type),
                 factors(subgroup, step));
    for (uint64_t first = 0; first < subgroup.count; first += base::kBlockElements) {
      const std::span<const float> block(wide.data() + first,
                                         std::min(base::kBlockElements, subgroup.count - first));
      std::vector<uint32_t> indices;
      std::vector<float> values;
      for (uint32_t i = 0; i < block.size(); i += static_cast<uint32_t>(kind.sparsity.every)) {
        indices.push_back(i);
        values.push_back(block[i]);
      }
      writer.add_block(indices, values);
    }
    const auto made = writer.finish();
    return {made.begin(), made.end()};
  }
  Status put_message(const storage::StoredSubgroup& subgroup, std::span<const std::byte> message) {
    return run(PutCompressedGradient{subgroup.id, message});
  }
};

TEST_P(CompressedContract, GivesTheBitsOfThePlainReference) {
  create();
  ReferenceModel reference(layout_, groups_);
  uint64_t sent = 0;
  const uint64_t before = device_->host_traffic().down(base::TrafficKind::kGradient);
  for (uint64_t number = 1; number <= 3; ++number) {
    ASSERT_TRUE(run(BeginStep{number}).ok());
    for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
      const auto bytes = message(subgroup, number);
      sent += bytes.size();
      const Status status = put_message(subgroup, bytes);
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
    Update update = update_of(number);
    // Samples of the variance are wanted too, where the device knows what they are of.
    std::vector<base::Bf16> samples(compress::sample_count(matrices_));
    for (SubgroupUpdate& entry : update.updates) {
      if (GetParam().sparsity.factors) entry.samples_out = samples.data();
    }
    const uint64_t up = device_->host_traffic().up(base::TrafficKind::kWeight);
    const Status status = run(update);
    ASSERT_TRUE(status.ok()) << status.to_string();
    finish_step(number);
    const auto expected = reference.step(number, GetParam().gradient_type, GetParam().weights_type,
                                         GetParam().sparsity);
    std::vector<base::Bf16> expected_samples(samples.size());
    uint64_t expected_up = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      expected_up += expected[i].size();
      if (!GetParam().sparsity.factors) continue;
      const storage::StoredSubgroup& subgroup = layout_.subgroups[i];
      compress::take_samples(matrices_, subgroup.first_element, reference.plane(i, 2),
                             expected_samples.data());
      expected_up += compress::samples_in(matrices_, subgroup.first_element, subgroup.count) *
                     sizeof(base::Bf16);
    }
    EXPECT_EQ(device_->host_traffic().up(base::TrafficKind::kWeight) - up, expected_up);
    EXPECT_TRUE(std::equal(samples.begin(), samples.end(), expected_samples.begin(),
                           [](base::Bf16 a, base::Bf16 b) { return a.bits == b.bits; }));
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(weights_[i] == expected[i]) << "step " << number << " subgroup " << i;
    }
  }
  expect_state(reference);
  EXPECT_EQ(device_->host_traffic().down(base::TrafficKind::kGradient) - before, sent);
  open();
  expect_state(reference);
}

TEST_P(CompressedContract, RefusesABadMessageAndLeavesTheStepAsItWas) {
  create();
  ReferenceModel reference(layout_, groups_);
  ASSERT_TRUE(run(BeginStep{1}).ok());
  const storage::StoredSubgroup& subgroup = layout_.subgroups.front();
  const auto good = message(subgroup, 1);
  auto bad = good;
  bad[good.size() / 2] ^= std::byte{4};
  EXPECT_EQ(put_message(subgroup, bad).code(), base::ErrorCode::kCorrupt);
  EXPECT_EQ(put_message(subgroup, std::span(good).first(good.size() - 1)).code(),
            base::ErrorCode::kCorrupt);
  EXPECT_EQ(put_message(layout_.subgroups[1], good).code(), base::ErrorCode::kInvalidArgument);
  const std::vector<std::byte> dense(subgroup.count * type_bytes());
  EXPECT_EQ(put(subgroup, dense, 0, subgroup.count).code(), base::ErrorCode::kInvalidArgument);
  if (GetParam().sparsity.factors) {
    compress::CompressedWriter writer;
    writer.begin(subgroup.id, subgroup.count, compress::ValueEncoding::kBf16,
                 {.values = std::vector<float>(7, 1.0f), .runs = {3, 4}});
    for (uint64_t first = 0; first < subgroup.count; first += base::kBlockElements) {
      writer.add_block({}, {});
    }
    const Status other_matrices = put_message(subgroup, writer.finish());
    EXPECT_EQ(other_matrices.code(), base::ErrorCode::kInvalidArgument);
    EXPECT_NE(other_matrices.what().find("7 row and column factors"), std::string::npos)
        << other_matrices.to_string();
    // As many as there should be, but of other rows and columns.
    compress::RowColumnFactors factors = test_factors(matrices_, subgroup, 1);
    ASSERT_GT(factors.runs[0], 1u);
    --factors.runs[0];
    ++factors.runs[1];
    writer.begin(subgroup.id, subgroup.count, compress::ValueEncoding::kBf16, factors);
    for (uint64_t first = 0; first < subgroup.count; first += base::kBlockElements) {
      writer.add_block({}, {});
    }
    EXPECT_EQ(put_message(subgroup, writer.finish()).code(), base::ErrorCode::kInvalidArgument);
  }
  // None of them stands in the way of the right one.
  for (const storage::StoredSubgroup& each : layout_.subgroups) {
    ASSERT_TRUE(put_message(each, message(each, 1)).ok());
  }
  EXPECT_EQ(put_message(subgroup, good).code(), base::ErrorCode::kInvalidArgument);
  Update update = update_of(1);
  ASSERT_TRUE(run(update).ok());
  finish_step(1);
  reference.step(1, GetParam().gradient_type, GetParam().weights_type, GetParam().sparsity);
  expect_state(reference);
}

INSTANTIATE_TEST_SUITE_P(Kinds, CompressedContract, testing::ValuesIn(compressed_kinds()),
                         [](const auto& param) { return param.param.name; });

std::vector<Kind> opencl_compressed_kinds() {
  std::vector<Kind> all;
  const auto add = [&](std::string name, TestSparsity sparsity, auto change) {
    Kind kind;
    kind.name = std::move(name);
    kind.opencl = true;
    kind.sparsity = sparsity;
    change(kind);
    all.push_back(kind);
  };
  add("opencl_bf16_factors", {.every = 100, .factors = true}, [](Kind&) {});
  add("opencl_signs_copied_q8", {.every = 31, .factors = true, .signs = true}, [](Kind& k) {
    k.format = StateFormat::kQ8;
    k.opencl_memory = OpenClMemory::kCopied;
  });
  add("opencl_f32_peer", {.every = 64}, [](Kind& k) {
    k.opencl_memory = OpenClMemory::kPeer;
    k.gradient_type = DataType::kF32;
  });
  return all;
}

INSTANTIATE_TEST_SUITE_P(OpenCl, CompressedContract, testing::ValuesIn(opencl_compressed_kinds()),
                         [](const auto& param) { return param.param.name; });

/// Residuals lie behind the rule's planes; an update neither reads nor writes them.
TEST(Residual, IsWrittenByItselfAndKeptThroughUpdates) {
  storage::StoreLayout layout = test_layout(StateFormat::kQ8, 0, 2);
  layout.planes.push_back(base::PlaneKind::kResidual);
  auto drive = EmulatedDrive::create(*EmulatedDrive::size_for(layout, storage::Durability::kStep));
  ASSERT_TRUE(drive.ok());
  LocalDeviceOptions options;
  options.name = options.path = "drive-a";
  options.slots = 2;
  auto made = create_emulated_device(options, layout, **drive);
  ASSERT_TRUE(made.ok()) << made.status().to_string();
  Device& device = **made;
  DeviceDriver driver;
  driver.drive(device);
  const auto residual_of = [&](const storage::StoredSubgroup& subgroup, uint64_t step) {
    std::vector<base::Bf16> residual(subgroup.count);
    const auto wide = random_floats(subgroup.count, step, 1.0f);
    for (size_t i = 0; i < wide.size(); ++i) residual[i] = base::to_bf16(wide[i]);
    return residual;
  };
  const auto expect_residual = [&](uint64_t of_step) {
    for (const storage::StoredSubgroup& subgroup : layout.subgroups) {
      std::vector<float> found(subgroup.count);
      ReadState read;
      read.subgroup = subgroup.id;
      read.count = subgroup.count;
      read.planes[3] = found.data();
      ASSERT_TRUE(driver.run(read).ok());
      const auto expected = residual_of(subgroup, of_step);
      for (size_t i = 0; i < found.size(); ++i) {
        ASSERT_EQ(found[i], of_step == 0 ? 0.0f : base::to_f32(expected[i]));
      }
    }
  };
  ASSERT_TRUE(driver.make_start(layout).ok());
  uint64_t kept = 0;
  for (uint64_t step = 1; step <= 5; ++step) {
    ASSERT_TRUE(driver.run(BeginStep{step}).ok());
    ASSERT_TRUE(driver.put_all(layout, step).ok());
    const auto before = device.store_traffic();
    ASSERT_TRUE(driver.update(layout, step).ok());
    const auto moved = device.store_traffic().since(before);
    EXPECT_EQ(moved.up(base::TrafficKind::kState), moved.down(base::TrafficKind::kState));
    if (step != 3) {  // a step that leaves it alone
      const uint64_t down = device.host_traffic().down(base::TrafficKind::kState);
      uint64_t bytes = 0;
      for (const storage::StoredSubgroup& subgroup : layout.subgroups) {
        const auto residual = residual_of(subgroup, step);
        WriteState write;
        write.subgroup = subgroup.id;
        write.count = subgroup.count;
        write.plane_mask = 1u << 3;
        write.residual = residual.data();
        ASSERT_TRUE(driver.run(write).ok());
        bytes += subgroup.count * 2;
      }
      EXPECT_EQ(device.host_traffic().down(base::TrafficKind::kState) - down, bytes);
    }
    ASSERT_TRUE(driver.prepare(step).ok());
    if (step == 4) {  // never was
      ASSERT_TRUE(driver.run(Abort{step}).ok());
      expect_residual(kept);
      break;
    }
    ASSERT_TRUE(driver.run(Commit{step}).ok());
    if (step != 3) kept = step;
    expect_residual(kept);
  }
}

}  // namespace
}  // namespace smartinf::csd
