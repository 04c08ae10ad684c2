#include "smartinf/sim/dram/memory.h"

#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/sim/dram/checker.h"
#include "smartinf/sim/dram/energy.h"
#include "smartinf/sim/dram/traffic.h"

namespace smartinf::sim::dram {
namespace {

using ::testing::HasSubstr;

Config preset(std::string_view name) { return load_config(name).value(); }

double bytes_per_s(const Config& config, const Counts& counts) {
  return static_cast<double>(counts.used_bytes) * config.organisation.clock_hz /
         static_cast<double>(counts.total_cycles());
}

/// Requests of all kinds, in bursts of one kind or mixed, at few or many rows, with pauses.
Counts random_requests(const Config& config, uint64_t seed, size_t requests,
                       std::vector<IssuedCommand>& trace) {
  std::mt19937_64 random(seed);
  Memory memory(config, &trace, 1 + static_cast<uint32_t>(random() % 80));
  const Organisation& o = config.organisation;
  const uint32_t rows = 1 + static_cast<uint32_t>(random() % 40);
  const uint32_t banks = 1 + static_cast<uint32_t>(random() % o.rank_banks());
  const uint32_t steady = 1 + static_cast<uint32_t>(random() % 50);
  auto kind = Request::Kind::kRead;
  int64_t at = 0;
  for (size_t i = 0; i < requests; ++i) {
    if (random() % steady == 0) kind = static_cast<Request::Kind>(random() % 4);
    if (random() % 5000 == 0) at += static_cast<int64_t>(random() % 30'000);
    at = memory.submit({.kind = kind,
                        .rank = static_cast<uint8_t>(random() % o.ranks),
                        .bank = static_cast<uint8_t>(random() % banks),
                        .words = static_cast<uint8_t>(1 + random() % o.burst_words()),
                        .row = static_cast<uint32_t>(random() % rows),
                        .at = at});
  }
  memory.finish();
  return memory.counts();
}

TEST(Dram, NoCommandBreaksAConstraintInTenMillion) {
  size_t commands = 0;
  for (uint64_t seed = 0; commands < 10'000'000; ++seed) {
    const auto names = preset_names();
    Config config = preset(names[seed % names.size()]);
    config.organisation.ranks = static_cast<uint32_t>(1 + seed / 4 % 3);
    config.in_bank.turnaround = seed % 3 == 0;
    config.in_bank.offset_bursts = static_cast<uint32_t>(1 + seed / 2 % 3);
    std::vector<IssuedCommand> trace;
    const Counts counts = random_requests(config, seed, 40'000, trace);
    const base::Status status = check_commands(config, trace);
    ASSERT_TRUE(status.ok()) << config.name << " seed " << seed << ": " << status.to_string();
    ASSERT_EQ(counts.requests, 40'000u);
    commands += trace.size();
  }
}

TEST(Dram, TheCheckerFindsEveryTimingThatIsBroken) {
  // The commands of a memory that is faster in one timing break that timing of the preset.
  const std::vector<std::pair<std::string, uint32_t Timing::*>> timings{
      {"tRCD", &Timing::rcd},     {"tRP", &Timing::rp},
      {"tRAS", &Timing::ras},     {"tRTP", &Timing::rtp},
      {"tWR", &Timing::wr},       {"tCCD_L", &Timing::ccd_l},
      {"tRRD_L", &Timing::rrd_l}, {"tRRD_S", &Timing::rrd_s},
      {"tFAW", &Timing::faw},     {"tWTR_L", &Timing::wtr_l},
      {"tWTR_S", &Timing::wtr_s}, {"data bus", &Timing::turnaround},
      {"tRFC", &Timing::rfc},     {"data bus", &Timing::rank_switch}};
  for (const auto& [name, timing] : timings) {
    Config config = preset("ddr4-2400-x8");
    config.organisation.ranks = 2;
    // Room for one cycle less, and nothing else that hides it.
    config.timing.rrd_s = 5;
    config.timing.wtr_s = 8;
    Config faster = config;
    --(faster.timing.*timing);
    bool found = false;
    for (uint64_t seed = 0; seed < 40 && !found; ++seed) {
      std::vector<IssuedCommand> trace;
      random_requests(faster, seed, 5'000, trace);
      ASSERT_EQ(check_commands(faster, trace).to_string(), "ok");
      found = check_commands(config, trace).to_string().find(name) != std::string::npos;
    }
    EXPECT_TRUE(found) << name;
  }
  Config config = preset("ddr4-2400-x8");
  std::vector<IssuedCommand> trace;
  random_requests(config, 1, 5'000, trace);
  auto lost = std::find_if(trace.begin(), trace.end(),
                           [](const auto& c) { return c.command == Command::kActivate; });
  trace.erase(lost);
  EXPECT_FALSE(check_commands(config, trace).ok());
  // Without refreshes.
  config.timing.refi = 0;
  trace.clear();
  random_requests(config, 1, 20'000, trace);
  config.timing.refi = 9364;
  EXPECT_THAT(check_commands(config, trace).to_string(), HasSubstr("tREFI"));
}

TEST(Dram, StreamsAndRandomReadsHaveTheDataSheetsRates) {
  Config config = preset("ddr4-2400-x8");
  const Counts stream = simulate_traffic(config, {.requests = 300'000}, false);
  EXPECT_NEAR(bytes_per_s(config, stream), 18.3e9, 0.01 * 18.3e9);
  EXPECT_GT(stream.share(Cause::kRefresh), 0.04);

  const Traffic random{.pattern = Pattern::kRandom, .requests = 300'000};
  const Counts with_refresh = simulate_traffic(config, random, false);
  EXPECT_GT(with_refresh.share(Cause::kActivates), 0.3);
  config.timing.refi = 0;
  const Counts without = simulate_traffic(config, random, false);
  // Four bursts in each tFAW: 4 x 64 bytes in 26 cycles.
  EXPECT_NEAR(bytes_per_s(config, without), 11.8e9, 0.03 * 11.8e9);
  EXPECT_NEAR(bytes_per_s(config, with_refresh) / bytes_per_s(config, without), 1 - 420.0 / 9364,
              0.01);
}

TEST(Dram, GathersGainWithTheNumberOfBanks) {
  const Config config = preset("ddr4-2400-x8");
  const auto gain = [&](uint32_t banks) {
    const Traffic traffic{.pattern = Pattern::kWords, .requests = 200'000, .banks = banks};
    const Counts plain = simulate_traffic(config, traffic, false);
    const Counts gathers = simulate_traffic(config, traffic, true);
    EXPECT_EQ(plain.used_bytes, gathers.used_bytes);
    EXPECT_DOUBLE_EQ(plain.used_share(), 1.0 / 8);
    EXPECT_DOUBLE_EQ(gathers.used_share(), 1.0 / 2);
    return static_cast<double>(plain.total_cycles()) / static_cast<double>(gathers.total_cycles());
  };
  EXPECT_LE(gain(1), 1.01);
  for (const uint32_t banks : {6u, 8u, 16u}) EXPECT_NEAR(gain(banks), 4, 0.2) << banks;
}

TEST(Dram, EveryCycleHasACause) {
  const Config config = preset("hbm2");
  std::vector<IssuedCommand> trace;
  const Counts counts = random_requests(config, 3, 20'000, trace);
  int64_t end = 0;
  uint64_t bursts = 0;
  for (const IssuedCommand& c : trace) {
    const bool reads = c.command == Command::kRead || c.command == Command::kFetchWords;
    const bool writes = c.command == Command::kWrite || c.command == Command::kSendOffsets ||
                        c.command == Command::kSendWords;
    if (!reads && !writes) continue;
    ++bursts;
    end = std::max(end, c.cycle + (reads ? config.timing.cl : config.timing.cwl) +
                            int64_t{config.organisation.burst_cycles});
  }
  EXPECT_GE(counts.total_cycles(), end);
  EXPECT_LE(counts.total_cycles(), end + 100);  // the last scatter
  EXPECT_EQ(counts.bus_bytes, bursts * config.organisation.burst_bytes());
}

TEST(Dram, OneRequestTakesItsCycles) {
  Config config = preset("ddr4-2400-x8");
  std::vector<IssuedCommand> trace;
  Memory memory(config, &trace);
  memory.submit({.kind = Request::Kind::kGather, .words = 8, .row = 7, .at = 100});
  memory.finish();
  std::vector<std::pair<Command, int64_t>> commands;
  for (const IssuedCommand& c : trace) commands.emplace_back(c.command, c.cycle);
  EXPECT_THAT(commands, testing::ElementsAre(std::pair(Command::kSendOffsets, 100),
                                             std::pair(Command::kActivate, 101),
                                             std::pair(Command::kGather, 120),
                                             std::pair(Command::kFetchWords, 168)));
}

TEST(Dram, OffsetsOfSeveralBurstsComeBeforeTheGather) {
  Config config = preset("ddr4-2400-x8");
  config.in_bank.offset_bursts = 2;
  std::vector<IssuedCommand> trace;
  Memory memory(config, &trace);
  memory.submit({.kind = Request::Kind::kGather, .words = 8, .row = 7, .at = 100});
  memory.submit({.kind = Request::Kind::kScatter, .words = 8, .row = 7, .at = 100});
  memory.finish();
  ASSERT_TRUE(check_commands(config, trace).ok());
  EXPECT_EQ(memory.counts().count(Command::kSendOffsets), 4u);
  EXPECT_EQ(memory.counts().count(Command::kSendWords), 1u);
  EXPECT_EQ(trace[0].command, Command::kSendOffsets);
  EXPECT_EQ(trace[1].command, Command::kSendOffsets);
  EXPECT_EQ(trace[1].cycle - trace[0].cycle, config.timing.ccd_l);
  // The checker knows them as well.
  trace.erase(trace.begin());
  EXPECT_FALSE(check_commands(config, trace).ok());
}

TEST(Dram, ACollectorSendsFullRowsAndThatWhichCameFirst) {
  const Config config = preset("ddr4-2400-x8");
  std::vector<std::pair<uint32_t, int>> sent;
  const auto send = [&](const Request& request) {
    EXPECT_EQ(request.used_bytes, kWordBytes * request.words);
    sent.emplace_back(request.row, request.words);
  };
  Collector collector(config.organisation, Request::Kind::kGather, 2);
  const auto add = [&](uint32_t row, int words) {
    for (int i = 0; i < words; ++i) collector.add({.row = row}, kWordBytes, send);
  };
  add(1, 8);
  add(1, 1);
  add(2, 7);
  add(1, 1);
  add(3, 1);  // three rows: the first goes
  add(2, 1);  // full
  add(1, 1);
  collector.flush(send);
  EXPECT_THAT(sent, testing::ElementsAre(std::pair(1u, 8), std::pair(1u, 2), std::pair(2u, 8),
                                         std::pair(3u, 1), std::pair(1u, 1)));
}

TEST(Dram, EnergyIsThatOfEachCommandsCurrent) {
  Config config = preset("ddr4-2400-x8");
  config.organisation.clock_hz = 1e9;
  config.timing.refi = 0;
  config.currents = {.vdd = 1,
                     .chips = 8,
                     .idd0 = 50,
                     .idd2n = 30,
                     .idd3n = 40,
                     .idd4r = 140,
                     .idd4w = 130,
                     .idd5b = 250,
                     .word_share = 0.5};
  Memory memory(config);
  memory.submit({.kind = Request::Kind::kRead, .row = 7});
  memory.submit({.kind = Request::Kind::kWrite, .row = 7});
  memory.submit({.kind = Request::Kind::kGather, .words = 8, .row = 7});
  memory.submit({.kind = Request::Kind::kScatter, .words = 6, .row = 7});
  memory.finish();
  const Counts& counts = memory.counts();
  ASSERT_EQ(counts.count(Command::kActivate), 1u);
  const auto energy = energy_of(config, counts).joules;
  // 8 chips at 1 V: 8 pJ for each mA and ns. A burst takes 4 ns, tRAS 39 and tRP 16.
  const std::vector<double> wanted{50.0 * 55 - 40 * 39 - 30 * 16,
                                   400,
                                   360,
                                   0.5 * (8 * 400 + 6 * 360),
                                   400 + 3 * 360,
                                   0,
                                   40.0 * static_cast<double>(counts.total_cycles())};
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_NEAR(energy[i], 8e-12 * wanted[i], 1e-20) << kEnergyNames[i];
  }

  // A stream's power is the data sheet's: IDD4R with the bus full, and now and then IDD5B.
  const Config sheet = preset("ddr4-2400-x8");
  const Counts stream = simulate_traffic(sheet, {.requests = 300'000}, false);
  const double seconds = static_cast<double>(stream.total_cycles()) / sheet.organisation.clock_hz;
  const double refreshing = 420.0 / 9364;
  const double milliamperes = 135 * (1 - refreshing) + 250 * refreshing;
  EXPECT_NEAR(energy_of(sheet, stream).total() / seconds, 8 * 1.2e-3 * milliamperes, 0.03);
}

TEST(Dram, ContradictionsAreRefusedWithBothNumbers) {
  const Config good = preset("ddr4-2400-x8");
  EXPECT_EQ(config_to_toml(parse_config(config_to_toml(good), "again").value()),
            config_to_toml(good));
  const auto refused = [&](auto change) {
    Config bad = good;
    change(bad);
    return check_config(bad).to_string();
  };
  EXPECT_THAT(refused([](Config& c) { c.timing.ras = 20; }),
              HasSubstr("tRAS 20 is less than tRCD + tRTP = 25"));
  EXPECT_THAT(refused([](Config& c) { c.timing.ccd_l = 3; }),
              HasSubstr("tCCD_L 3 is less than tCCD_S 4"));
  EXPECT_THAT(refused([](Config& c) { c.timing.faw = 15; }),
              HasSubstr("tFAW 15 is less than 4 x tRRD_S = 16"));
  EXPECT_THAT(refused([](Config& c) { c.timing.refi = 420; }),
              HasSubstr("tREFI 420 is less than tRFC + tRAS + tRP = 475"));
  EXPECT_THAT(refused([](Config& c) { c.currents.idd4r = 40; }),
              HasSubstr("IDD4R 40 is less than IDD3N 43"));
  EXPECT_THAT(refused([](Config& c) { c.organisation.banks = 3; }), HasSubstr("no power of two"));
  EXPECT_THAT(parse_config("[timing]\ntRCDD = 3\n", "x.toml").status().to_string(),
              HasSubstr("tRCD"));
  EXPECT_THAT(load_config("ddr4-2400").status().to_string(), HasSubstr("ddr4-2400-x8"));
  for (const std::string_view name : preset_names()) EXPECT_FALSE(preset(name).source.empty());
}

}  // namespace
}  // namespace smartinf::sim::dram
