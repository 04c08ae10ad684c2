#include "smartinf/train/memory_state.h"

#include <array>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/test_scratch.h"

namespace smartinf::train {
namespace {

TEST(MemoryState, ClientMetadataComesBackUnderEitherKey) {
  plan::ParameterSpace space;
  ASSERT_TRUE(space.add("weights", {3}, 0).ok());
  const std::vector<float> plane = {1, 2, 3};
  const base::Scratch scratch;

  ASSERT_TRUE(MemoryState::save(scratch.path(), space, 7, "new", {plane, plane, plane}).ok());
  auto state = MemoryState::open(scratch.path(), space);
  ASSERT_TRUE(state.ok()) << state.status().to_string();
  EXPECT_EQ(state->client_metadata(), "new");
  const auto file = model::SafetensorsFile::open(MemoryState::path(scratch.path()));
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->metadata("client_metadata"), "new");
  EXPECT_EQ(file->metadata("blob"), "");

  // As files were written before the key had its name.
  std::vector<model::TensorInfo> tensors;
  for (const char* name : {"master", "momentum", "variance"}) {
    tensors.push_back({name, base::DataType::kF32, {space.count()}});
  }
  auto writer = model::SafetensorsWriter::create(
      MemoryState::path(scratch.path()), tensors,
      {{"parameter_space", space.to_json()}, {"step", "7"}, {"blob", "old"}});
  ASSERT_TRUE(writer.ok());
  for (size_t i = 0; i < tensors.size(); ++i) {
    ASSERT_TRUE(writer->append(std::as_bytes(std::span(plane))).ok());
  }
  ASSERT_TRUE(writer->finish().ok());
  state = MemoryState::open(scratch.path(), space);
  ASSERT_TRUE(state.ok()) << state.status().to_string();
  EXPECT_EQ(state->client_metadata(), "old");
}

}  // namespace
}  // namespace smartinf::train
