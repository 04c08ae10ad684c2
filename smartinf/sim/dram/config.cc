#include "smartinf/sim/dram/config.h"

#include <bit>
#include <filesystem>
#include <limits>

#include <fmt/format.h>

#include "smartinf/base/file.h"
#include "smartinf/base/key_table.h"
#include "smartinf/base/nearest.h"

namespace smartinf::sim::dram {
namespace {

using base::ErrorCode;
using base::NamedField;
using base::Result;
using base::Status;

constexpr double kCyclesMax = 1e6;

template <typename T>
base::Number from_one(T& value, double most = kCyclesMax) {
  return {&value, 1, most, "from 1"};
}
base::Number from_zero(uint32_t& value) { return {&value, 0, kCyclesMax, "from 0"}; }

std::vector<NamedField> fields_of(Organisation& o) {
  return {
      {"clock_hz", from_one(o.clock_hz, 1e12), "of commands; data move twice in a cycle"},
      {"channels", from_one(o.channels), "all alike"},
      {"ranks", from_one(o.ranks), "of a channel"},
      {"bank_groups", from_one(o.bank_groups)},
      {"banks", from_one(o.banks), "of a group"},
      {"row_bytes", from_one(o.row_bytes), "of all chips of a rank"},
      {"bus_bytes", from_one(o.bus_bytes)},
      {"burst_cycles", from_one(o.burst_cycles), "half the burst length"},
      {"command_cycles", from_one(o.command_cycles), "that a command takes of the command bus"},
  };
}

std::vector<NamedField> fields_of(Timing& t) {
  return {
      {"CL", from_one(t.cl), "all in cycles"},
      {"CWL", from_one(t.cwl)},
      {"tRCD", from_one(t.rcd)},
      {"tRP", from_one(t.rp)},
      {"tRAS", from_one(t.ras)},
      {"tRTP", from_one(t.rtp)},
      {"tWR", from_one(t.wr)},
      {"tCCD_S", from_one(t.ccd_s), "_S: between bank groups, _L: in one"},
      {"tCCD_L", from_one(t.ccd_l)},
      {"tRRD_S", from_one(t.rrd_s)},
      {"tRRD_L", from_one(t.rrd_l)},
      {"tFAW", from_one(t.faw)},
      {"tWTR_S", from_one(t.wtr_s)},
      {"tWTR_L", from_one(t.wtr_l)},
      {"turnaround", from_zero(t.turnaround), "of the data bus, from a read to a write"},
      {"rank_switch", from_zero(t.rank_switch), "of the data bus, from rank to rank"},
      {"tRFC", from_one(t.rfc)},
      {"tREFI", from_zero(t.refi), "0: no refresh"},
  };
}

std::vector<NamedField> fields_of(InBank& in_bank) {
  return {
      {"column_cycles", from_zero(in_bank.column_cycles),
       "of a gather, from word to word; 0: tCCD_L"},
      {"offset_bursts", from_one(in_bank.offset_bursts, 8), "that bring a gather's offsets"},
      {"turnaround", &in_bank.turnaround,
       "bursts to and from the banks' buffers keep tWTR and turnaround"},
  };
}

std::vector<NamedField> fields_of(Currents& c) {
  const auto of = [](double& value, double most) {
    return base::Number{&value, 0, most, "from 0"};
  };
  return {
      {"VDD", of(c.vdd, 10), "0: energy is not known"},
      {"chips", from_one(c.chips), "of a rank"},
      {"IDD0", of(c.idd0, 1e5), "mA of a chip, all"},
      {"IDD2N", of(c.idd2n, 1e5)},
      {"IDD3N", of(c.idd3n, 1e5)},
      {"IDD4R", of(c.idd4r, 1e5)},
      {"IDD4W", of(c.idd4w, 1e5)},
      {"IDD5B", of(c.idd5b, 1e5)},
      {"word_share", of(c.word_share, 1), "energy of a word in the bank, of a burst's"},
  };
}

/// Each section's name and fields.
auto sections_of(Config& config) {
  return std::vector<std::pair<std::string_view, std::vector<NamedField>>>{
      {"organisation", fields_of(config.organisation)},
      {"timing", fields_of(config.timing)},
      {"in_bank", fields_of(config.in_bank)},
      {"currents", fields_of(config.currents)}};
}

struct Term {
  std::string_view name;
  uint64_t cycles;
};

/// Refuses `less` below `more`, with names and numbers of both.
Status at_least(const Term& less, const Term& more) {
  if (less.cycles >= more.cycles) return {};
  return Status(
      ErrorCode::kInvalidArgument,
      fmt::format("{} {} is less than {} {}", less.name, less.cycles, more.name, more.cycles),
      fmt::format("{} can be no less.", less.name));
}

}  // namespace

std::vector<std::string_view> preset_names() {
  std::vector<std::string_view> names;
  for (const Preset& preset : presets()) names.push_back(preset.name);
  return names;
}

Result<Config> load_config(std::string_view name_or_path) {
  if (name_or_path.find('/') != std::string_view::npos || name_or_path.ends_with(".toml")) {
    SI_ASSIGN_OR_RETURN(
        const std::string text,
        base::read_text_file(std::string(name_or_path), "cannot read the memory's file"));
    return parse_config(text, name_or_path);
  }
  for (const Preset& preset : presets()) {
    if (base::same_name(preset.name, name_or_path)) return parse_config(preset.toml, preset.name);
  }
  return Status(ErrorCode::kNotFound,
                fmt::format("unknown memory '{}'{}", name_or_path,
                            base::did_you_mean(name_or_path, preset_names())),
                "Or give a .toml file.");
}

Result<Config> parse_config(std::string_view toml_text, std::string_view origin) {
  Config config;
  config.name = std::string(origin);
  base::KeyReader reader(config.name);
  const std::vector<NamedField> texts{{"name", &config.name}, {"source", &config.source}};
  std::vector<std::string_view> known{"name", "source"};
  auto sections = sections_of(config);
  for (const auto& section : sections) known.push_back(section.first);
  for (base::TomlEntry& entry : reader.parse(toml_text)) {
    const auto found = std::find_if(sections.begin(), sections.end(), [&](const auto& section) {
      return section.first == entry.name;
    });
    if (found != sections.end() && entry.kind == base::TomlEntry::Kind::kTable) {
      reader.read(entry.name, entry.tables.front(), found->second);
    } else if (found != sections.end()) {
      reader.problem(entry.at, fmt::format("{0} is a section: write [{0}]", entry.name));
    } else if (entry.kind == base::TomlEntry::Kind::kValue &&
               (entry.name == "name" || entry.name == "source")) {
      reader.read("", {entry.name, entry.at, entry.value}, texts);
    } else {
      reader.problem(entry.at, fmt::format("unknown key '{}'{}", base::excerpt(entry.name),
                                           base::did_you_mean(entry.name, known)));
    }
  }
  SI_RETURN_IF_ERROR(reader.status());
  SI_RETURN_IF_ERROR(check_config(config).with_context(origin));
  return config;
}

std::string config_to_toml(const Config& config) {
  Config copy = config;
  std::string text = fmt::format("name = {}\nsource = {}\n", base::format_value(&copy.name),
                                 base::format_value(&copy.source));
  for (const auto& [name, fields] : sections_of(copy)) {
    text += fmt::format("\n[{}]\n", name);
    for (const NamedField& field : fields) {
      text += fmt::format("{} = {}", field.name, base::format_value(field.field));
      text += field.help.empty() ? "\n" : fmt::format("  # {}\n", field.help);
    }
  }
  return text;
}

Status check_config(const Config& config) {
  Config copy = config;
  for (const auto& [name, fields] : sections_of(copy)) {
    for (const NamedField& field : fields) {
      const auto* number = std::get_if<base::Number>(&field.field);
      if (number == nullptr) continue;
      const double value =
          std::visit([](auto* v) { return static_cast<double>(*v); }, number->value);
      if (!base::in_bounds(*number, value)) {
        return Status(ErrorCode::kInvalidArgument,
                      fmt::format("{}.{} is {}", name, field.name, value),
                      fmt::format("Give {}.", base::expected(field.field)));
      }
    }
  }
  const Organisation& o = config.organisation;
  const Timing& t = config.timing;
  for (const auto& [name, value] :
       {std::pair<const char*, uint32_t>{"bank_groups", o.bank_groups},
        {"banks", o.banks},
        {"row_bytes", o.row_bytes},
        {"burst_bytes (2 x bus_bytes x burst_cycles)", o.burst_bytes()}}) {
    if (!std::has_single_bit(value)) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("organisation: {} is {}, no power of two", name, value),
                    "Addresses are divided by bits.");
    }
  }
  if (uint64_t{o.ranks} * o.bank_groups * o.banks > 64) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("organisation: {} ranks of {} banks are more than 64 banks", o.ranks,
                              o.rank_banks()),
                  "A channel is simulated with up to 64 banks.");
  }
  SI_RETURN_IF_ERROR(at_least({"row_bytes", o.row_bytes}, {"a burst, bytes:", o.burst_bytes()}));
  SI_RETURN_IF_ERROR(at_least({"a burst, bytes:", o.burst_bytes()}, {"a word,", kWordBytes}));
  SI_RETURN_IF_ERROR(at_least({"tCCD_S", t.ccd_s}, {"burst_cycles", o.burst_cycles}));
  SI_RETURN_IF_ERROR(at_least({"tCCD_L", t.ccd_l}, {"tCCD_S", t.ccd_s}));
  SI_RETURN_IF_ERROR(at_least({"tRRD_L", t.rrd_l}, {"tRRD_S", t.rrd_s}));
  SI_RETURN_IF_ERROR(at_least({"tWTR_L", t.wtr_l}, {"tWTR_S", t.wtr_s}));
  SI_RETURN_IF_ERROR(at_least({"tFAW", t.faw}, {"4 x tRRD_S =", 4ull * t.rrd_s}));
  SI_RETURN_IF_ERROR(at_least({"tRAS", t.ras}, {"tRCD + tRTP =", uint64_t{t.rcd} + t.rtp}));
  SI_RETURN_IF_ERROR(at_least({"CL", t.cl}, {"CWL", t.cwl}));
  const Currents& c = config.currents;
  for (const auto& [name, current] :
       {std::pair{"IDD4R", c.idd4r}, {"IDD4W", c.idd4w}, {"IDD5B", c.idd5b}, {"IDD0", c.idd0}}) {
    if (c.vdd > 0 && current < c.idd3n) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("{} {} is less than IDD3N {}", name, current, c.idd3n),
                    "Give mA of one chip, of one data sheet.");
    }
  }
  if (t.refi > 0) {
    SI_RETURN_IF_ERROR(
        at_least({"tREFI", t.refi}, {"tRFC + tRAS + tRP =", uint64_t{t.rfc} + t.ras + t.rp}));
  }
  return {};
}

}  // namespace smartinf::sim::dram
