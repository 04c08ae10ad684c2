#include "smartinf/sim/cluster.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/file.h"
#include "smartinf/base/key_table.h"

namespace smartinf::sim {
namespace {

using base::ErrorCode;
using base::NamedField;
using base::Result;
using base::Status;

constexpr size_t kBoxesMax = 1024;
constexpr uint32_t kRanksMax = 64;  // of a box

struct BoxKeys {
  std::string name, machine, cores;
  uint32_t ranks = 0;
  uint32_t count = 1;
};

struct LinkKeys {
  std::string from, to, rate, together;
  Link link;
};

std::vector<NamedField> fields_of(BoxKeys& keys) {
  return {{"name", &keys.name},
          {"machine", &keys.machine},
          {"cores", &keys.cores},
          {"ranks", base::Number{&keys.ranks, 1, kRanksMax, "from 1 to 64"}},
          {"count", base::Number{&keys.count, 1, kBoxesMax, "from 1 to 1024"}}};
}

std::vector<NamedField> fields_of(LinkKeys& keys) {
  return {{"from", &keys.from},
          {"to", &keys.to},
          {"rate", &keys.rate},
          {"together", &keys.together},
          {"latency_s", base::Number{&keys.link.latency_s, 0, 1e3, "that is not negative"}},
          {"spread", base::Number{&keys.link.spread, 0, 10, "that is not negative"}}};
}

/// As much as all cores of a box could send other boxes and get from them.
double& cores_rate(Box& box) { return box.machine.network.ranks_cores_bytes_per_s; }

std::string rate_text(double bytes_per_s) {
  return fmt::format("{:.6g} Mbit/s", 8e-6 * bytes_per_s);
}

std::string link_text(const Link& link) {
  std::string text = fmt::format("rate = \"{}\"\n", rate_text(link.bytes_per_s));
  if (link.together_bytes_per_s > 0) {
    text += fmt::format("together = \"{}\"\n", rate_text(link.together_bytes_per_s));
  }
  return text + fmt::format("latency_s = {:.4g}\nspread = {:.3g}\n", link.latency_s, link.spread);
}

bool same(const Link& a, const Link& b) { return link_text(a) == link_text(b); }

/// Reads tables of a cluster's file into a cluster.
class ClusterReader {
 public:
  ClusterReader(std::string_view origin, const LoadMachine& load)
      : reader_(std::string(origin)), load_(load) {
    cluster_.origin = cluster_.name = std::string(origin);
  }

  Result<Cluster> read(std::string_view text) {
    std::vector<base::TomlEntry> entries = reader_.parse(text);
    for (base::TomlEntry& entry : entries) SI_RETURN_IF_ERROR(take(entry));
    if (reader_.ok() && cluster_.boxes.empty()) reader_.problem("there is no [[box]]");
    SI_RETURN_IF_ERROR(reader_.status());
    connect();
    SI_RETURN_IF_ERROR(reader_.status());
    return std::move(cluster_);
  }

 private:
  Status take(base::TomlEntry& entry) {
    constexpr std::string_view kEntries[] = {"name", "box", "links", "link"};
    if (entry.name == "name") {
      reader_.read("", base::TomlTable::Key{entry.name, entry.at, entry.value},
                   std::vector<NamedField>{{"name", &cluster_.name}});
    } else if (entry.name == "box") {
      for (const base::TomlTable& table : reader_.list_of(entry, kBoxesMax)) {
        SI_RETURN_IF_ERROR(take_box(table));
      }
    } else if (entry.name == "links" && entry.kind == base::TomlEntry::Kind::kTable) {
      take_link(entry.tables.front(), "links", between_.emplace());
    } else if (entry.name == "link") {
      for (const base::TomlTable& table : reader_.list_of(entry, kBoxesMax * kBoxesMax)) {
        take_link(table, "link", given_.emplace_back());
      }
    } else {
      reader_.problem(entry.at,
                      fmt::format("unknown section or key '{}'{}", base::excerpt(entry.name),
                                  base::did_you_mean(entry.name, kEntries)));
    }
    return {};
  }

  Status take_box(const base::TomlTable& table) {
    BoxKeys keys;
    reader_.read("box", table, fields_of(keys));
    if (!reader_.ok()) return {};
    if (keys.machine.empty()) {
      reader_.problem(table.at, "box.machine is not given: name a machine file or a preset");
      return {};
    }
    Box box{keys.name, keys.machine, {}, keys.ranks};
    SI_ASSIGN_OR_RETURN(box.machine, load_(keys.machine));
    if (!keys.cores.empty()) take_rate(table, "box.cores", keys.cores, cores_rate(box));
    if (box.ranks == 0) box.ranks = box.machine.gpu.name == "none" ? 1 : box.machine.gpu.count;
    for (uint32_t i = 0; i < keys.count; ++i) {
      const std::string base_name = keys.name.empty() ? "box" : keys.name;
      box.name = keys.count == 1 && !keys.name.empty()
                     ? keys.name
                     : fmt::format("{}-{}", base_name, cluster_.boxes.size() + 1);
      if (!by_name_.emplace(box.name, static_cast<uint32_t>(cluster_.boxes.size())).second) {
        reader_.problem(table.at, fmt::format("two boxes are named '{}'", base::excerpt(box.name)));
      }
      cluster_.boxes.push_back(box);
    }
    if (cluster_.boxes.size() > kBoxesMax) reader_.problem(table.at, "more than 1024 boxes");
    return {};
  }

  void take_link(const base::TomlTable& table, std::string_view section, LinkKeys& keys) {
    reader_.read(section, table, fields_of(keys));
    for (const auto& [key, text, rate] :
         {std::tuple("rate", &keys.rate, &keys.link.bytes_per_s),
          std::tuple("together", &keys.together, &keys.link.together_bytes_per_s)}) {
      if (text->empty() && rate != &keys.link.bytes_per_s) continue;
      take_rate(table, fmt::format("{}.{}", section, key), *text, *rate);
    }
  }

  void take_rate(const base::TomlTable& table, std::string_view key, const std::string& text,
                 double& rate) {
    const Result<double> parsed = parse_rate(text);
    if (parsed.ok()) {
      rate = *parsed;
    } else {
      reader_.problem(table.at, fmt::format("{}: {}", key, parsed.status().what()));
    }
  }

  /// Links of which one direction is given are alike in both; pairs that no [[link]] names are as
  /// [links] says.
  void connect() {
    const auto boxes = static_cast<uint32_t>(cluster_.boxes.size());
    cluster_.links.assign(size_t{boxes} * boxes, between_ ? between_->link : Link{});
    std::map<std::pair<uint32_t, uint32_t>, Link> named;
    for (const LinkKeys& keys : given_) {
      const auto from = by_name_.find(keys.from);
      const auto to = by_name_.find(keys.to);
      if (from == by_name_.end() || to == by_name_.end()) {
        reader_.problem(fmt::format("a link is from '{}' to '{}', and there is no box '{}'",
                                    keys.from, keys.to,
                                    from == by_name_.end() ? keys.from : keys.to));
      } else if (!named.emplace(std::pair(from->second, to->second), keys.link).second) {
        reader_.problem(fmt::format("two links are from '{}' to '{}'", keys.from, keys.to));
      }
    }
    for (const auto& [pair, link] : named) {
      cluster_.link(pair.first, pair.second) = link;
      const std::pair back(pair.second, pair.first);
      if (!named.contains(back)) cluster_.link(back.first, back.second) = link;
    }
    for (uint32_t a = 0; a < boxes; ++a) {
      for (uint32_t b = 0; b < boxes; ++b) {
        if (a == b || cluster_.link(a, b).bytes_per_s > 0) continue;
        reader_.problem(
            fmt::format("there is no link from '{}' to '{}': write [links] with rate = \"1 "
                        "Gbit/s\", for all that "
                        "no [[link]] names",
                        cluster_.boxes[a].name, cluster_.boxes[b].name));
        return;
      }
    }
  }

  base::KeyReader reader_;
  const LoadMachine& load_;
  Cluster cluster_;
  std::map<std::string, uint32_t> by_name_;
  std::optional<LinkKeys> between_;
  std::vector<LinkKeys> given_;
};

}  // namespace

uint32_t Cluster::ranks() const {
  uint32_t sum = 0;
  for (const Box& box : boxes) sum += box.ranks;
  return sum;
}

double Cluster::spread() const {
  double most = 0;
  for (const Link& one : links) most = std::max(most, one.spread);
  return most;
}

Cluster one_box(const Machine& machine, uint32_t ranks) {
  Cluster cluster;
  cluster.name = machine.name;
  cluster.boxes.push_back({machine.name, machine.origin, machine, ranks});
  cluster.links.resize(1);
  return cluster;
}

Result<double> parse_rate(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  for (const auto& [name, bytes] : {std::pair<std::string_view, double>{"Mbit/s", 1e6 / 8},
                                    {"Gbit/s", 1e9 / 8},
                                    {"MB/s", 1e6},
                                    {"GB/s", 1e9}}) {
    if (error == std::errc() && unit == name && value > 0 && value < 1e9) return value * bytes;
  }
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("expected a rate like \"1 Gbit/s\", found '{}'", base::excerpt(text)),
                "The units are Mbit/s, Gbit/s, MB/s and GB/s.");
}

Result<Cluster> parse_cluster(std::string_view toml_text, std::string_view origin,
                              const LoadMachine& load) {
  return ClusterReader(origin, load).read(toml_text);
}

Result<Cluster> load_cluster(const std::string& path) {
  SI_ASSIGN_OR_RETURN(const std::string text,
                      base::read_text_file(path, "cannot read the cluster's file"));
  return parse_cluster(text, path, [&](const std::string& name) {
    const std::filesystem::path beside = std::filesystem::path(path).parent_path() / name;
    return load_machine(name.ends_with(".toml") ? beside.string() : name);
  });
}

std::string cluster_to_toml(const Cluster& cluster) {
  std::string text = fmt::format("name = '{}'\n", cluster.name);
  for (const Box& box : cluster.boxes) {
    text += fmt::format("\n[[box]]\nname = '{}'\nmachine = '{}'\nranks = {}\n", box.name, box.file,
                        box.ranks);
    if (const double cores = box.machine.network.ranks_cores_bytes_per_s; cores > 0) {
      text += fmt::format("cores = \"{}\"\n", rate_text(cores));
    }
  }
  const auto boxes = static_cast<uint32_t>(cluster.boxes.size());
  if (boxes < 2) return text;
  const Link& first = cluster.link(0, 1);
  text += "\n[links]\n" + link_text(first);
  for (uint32_t a = 0; a < boxes; ++a) {
    for (uint32_t b = 0; b < boxes; ++b) {
      if (a == b || same(cluster.link(a, b), first)) continue;
      text += fmt::format("\n[[link]]\nfrom = '{}'\nto = '{}'\n{}", cluster.boxes[a].name,
                          cluster.boxes[b].name, link_text(cluster.link(a, b)));
      if (same(cluster.link(b, a), first)) {  // else the reverse would be taken to be alike
        text += fmt::format("\n[[link]]\nfrom = '{}'\nto = '{}'\n{}", cluster.boxes[b].name,
                            cluster.boxes[a].name, link_text(first));
      }
    }
  }
  return text;
}

}  // namespace smartinf::sim
