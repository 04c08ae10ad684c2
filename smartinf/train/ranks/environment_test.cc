#include "smartinf/train/ranks/environment.h"

#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace smartinf::train {
namespace {

using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

base::Result<std::optional<RankEnvironment>> read(const Variables& variables) {
  return rank_environment([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

TEST(RankEnvironment, OneProcessHasNone) {
  EXPECT_FALSE(*read({}));
  EXPECT_FALSE(*read({{"RANK", "0"}, {"WORLD_SIZE", "1"}}));
  EXPECT_FALSE(*read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}})) << "a batch job's script";
}

TEST(RankEnvironment, TorchrunSaysWhereItsStoreIs) {
  const auto read_ = read({{"RANK", "2"},
                           {"WORLD_SIZE", "4"},
                           {"MASTER_ADDR", "node1"},
                           {"MASTER_PORT", "29400"},
                           {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                           {"TORCHELASTIC_RUN_ID", "job"},
                           {"TORCHELASTIC_RESTART_COUNT", "3"}});
  ASSERT_TRUE(read_.ok() && *read_) << read_.status().to_string();
  const RankEnvironment& found = **read_;
  EXPECT_EQ(found.rank, 2u);
  EXPECT_EQ(found.world, 4u);
  EXPECT_EQ(found.host, "node1");
  EXPECT_EQ(found.port, 29400u);
  EXPECT_TRUE(found.store_runs);
  EXPECT_EQ(found.start, "job/3");
}

TEST(RankEnvironment, SrunAndMpirunCountRanksUnderTheirOwnNames) {
  const Variables master{{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}};
  Variables srun{{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "3"}};
  Variables mpirun{{"OMPI_COMM_WORLD_RANK", "4"}, {"OMPI_COMM_WORLD_SIZE", "5"}};
  srun.insert(master.begin(), master.end());
  mpirun.insert(master.begin(), master.end());
  ASSERT_TRUE(read(srun).ok());
  EXPECT_EQ((*read(srun))->rank, 1u);
  EXPECT_EQ((*read(srun))->world, 3u);
  EXPECT_FALSE((*read(srun))->store_runs) << "rank 0 serves it";
  ASSERT_TRUE(read(mpirun).ok());
  EXPECT_EQ((*read(mpirun))->rank, 4u);
  // mpirun starts its daemons by srun, whose variables the ranks get as well.
  mpirun["SLURM_PROCID"] = "0";
  mpirun["SLURM_STEP_NUM_TASKS"] = "1";
  ASSERT_TRUE(read(mpirun).ok() && *read(mpirun));
  EXPECT_EQ((*read(mpirun))->world, 5u);
}

TEST(RankEnvironment, WhatIsMissingOrWrongIsNamed) {
  const Variables good{
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}};
  const auto problem = [&](const std::string& name, std::optional<std::string> value) {
    Variables variables = good;
    variables.erase(name);
    if (value) variables[name] = *value;
    const auto made = read(variables);
    EXPECT_FALSE(made.ok()) << name;
    return made.ok() ? "" : made.status().to_string();
  };
  EXPECT_THAT(problem("RANK", {}), HasSubstr("no RANK"));
  EXPECT_THAT(problem("RANK", "2"), HasSubstr("RANK = 2, but WORLD_SIZE = 2"));
  EXPECT_THAT(problem("RANK", "one"), HasSubstr("RANK is \"one\""));
  EXPECT_THAT(problem("WORLD_SIZE", "0"), HasSubstr("WORLD_SIZE = 0"));
  EXPECT_THAT(problem("MASTER_ADDR", {}), HasSubstr("no MASTER_ADDR"));
  EXPECT_THAT(problem("MASTER_PORT", {}), HasSubstr("no MASTER_PORT"));
  EXPECT_THAT(problem("MASTER_PORT", "70000"), HasSubstr("MASTER_PORT is \"70000\""));
}

}  // namespace
}  // namespace smartinf::train
