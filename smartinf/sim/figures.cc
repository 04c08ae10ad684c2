#include "smartinf/sim/figures.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/sim/paper_rows.h"

namespace smartinf::sim {
namespace {

using base::Result;
using base::Status;

constexpr std::array<uint32_t, 10> kNumbers{3, 9, 10, 11, 12, 13, 14, 15, 16, 17};
constexpr std::array kAllMethods{Method::kBaseline, Method::kSmart, Method::kSmartOver,
                                 Method::kSmartComp};

/// One configuration; what is not said is the paper's usual.
struct Point {
  std::string_view model = "gpt2-4.0B";
  std::string_view machine = "smartssd-a5000";
  uint32_t devices = 10;
  uint32_t gpus = 1;
  StepOptions options = {};
};

struct Ran {
  StepTimes times;
  Machine machine;
  ModelShape model;
};

Result<Ran> run(const Point& point) {
  Ran ran;
  SI_ASSIGN_OR_RETURN(ran.model, model_preset(point.model));
  SI_ASSIGN_OR_RETURN(ran.machine, load_machine(point.machine));
  ran.machine = with_devices(std::move(ran.machine), point.devices);
  ran.machine.gpu.count = point.gpus;
  if (point.gpus > 1) ran.machine.gpu.link_is_host_link = true;
  SI_ASSIGN_OR_RETURN(ran.times, simulate_step(ran.model, ran.machine, point.options));
  return ran;
}

StepOptions with(Method method) {
  StepOptions options;
  options.method = method;
  return options;
}

class Builder {
 public:
  explicit Builder(Figure& figure) : figure_(figure) {}

  /// Adds a row; its value is the step's seconds until the caller says otherwise.
  Result<FigureRow*> add(std::string panel, std::string series, std::string x, const Point& point) {
    SI_ASSIGN_OR_RETURN(ran_, run(point));
    FigureRow row;
    row.panel = std::move(panel);
    row.series = std::move(series);
    row.x = std::move(x);
    row.model = ran_.model.name;
    row.gpu = ran_.machine.gpu.name;
    row.devices = point.devices;
    row.forward_s = ran_.times.forward_s;
    row.backward_s = ran_.times.backward_s;
    row.update_s = ran_.times.update_s;
    row.total_s = ran_.times.total_s;
    row.value = row.total_s;
    figure_.rows.push_back(std::move(row));
    return &figure_.rows.back();
  }
  const Ran& ran() const { return ran_; }

  /// All methods of one configuration, as speed-ups over its baseline.
  Status speed_ups(const std::string& panel, const std::string& x, Point point,
                   std::span<const Method> methods) {
    double baseline_s = 0;
    for (const Method method : methods) {
      point.options.method = method;
      SI_ASSIGN_OR_RETURN(FigureRow * row, add(panel, std::string(method_name(method)), x, point));
      if (method == Method::kBaseline) baseline_s = row->total_s;
      row->value = baseline_s / row->total_s;
    }
    return {};
  }

 private:
  Figure& figure_;
  Ran ran_;
};

constexpr std::array kThree{Method::kBaseline, Method::kSmartOver, Method::kSmartComp};

Status motivation(Figure& figure) {
  figure.title = "One plain SSD: where a step's time goes; RAID0: what more drives bring";
  figure.x_label = "model / drives";
  figure.y_label = "% of the step / speed-up";
  Builder builder(figure);
  for (const PaperShares& shares : paper_shares()) {
    Point point;
    point.model = shares.model;
    point.devices = 1;
    point.options = with(Method::kBaseline);
    const std::array<std::pair<const char*, double>, 3> phases{
        {{"forward", shares.forward}, {"backward", shares.backward}, {"update", shares.update}}};
    for (const auto& [phase, paper] : phases) {
      SI_ASSIGN_OR_RETURN(FigureRow * row,
                          builder.add("share of time, %", phase, std::string(shares.model), point));
      const double part = std::string_view(phase) == "forward"    ? row->forward_s
                          : std::string_view(phase) == "backward" ? row->backward_s
                                                                  : row->update_s;
      row->value = 100 * part / row->total_s;
      row->paper = paper;
    }
  }
  double one_s = 0;
  for (const PaperRow& given : paper_rows()) {
    if (given.group != "raid0") continue;
    Point point;
    point.devices = given.devices;
    point.options = with(Method::kBaseline);
    SI_ASSIGN_OR_RETURN(FigureRow * row, builder.add("RAID0 speed-up", "baseline",
                                                     std::to_string(given.devices), point));
    if (given.devices == 1) one_s = row->total_s;
    row->value = one_s / row->total_s;
    row->paper = 53.7 / given.total_s;
  }
  return {};
}

Status ablation(Figure& figure) {
  figure.title = "What each part brings: seconds in a step";
  figure.x_label = "method";
  figure.y_label = "seconds";
  figure.stacked = true;
  Builder builder(figure);
  for (const PaperRow& given : paper_rows()) {
    if (given.group != "seconds") continue;
    Point point;
    point.model = given.model;
    point.devices = given.devices;
    point.options = with(given.method);
    SI_ASSIGN_OR_RETURN(FigureRow * row,
                        builder.add(fmt::format("{}, {} devices", given.model, given.devices),
                                    "simulated", std::string(method_name(given.method)), point));
    row->paper = given.total_s;
    row->paper_forward_s = given.forward_s;
    row->paper_computed_s = given.forward_s + given.backward_s;
  }
  return {};
}

Status larger_models(Figure& figure) {
  figure.title = "Larger models, ten devices: speed-up over the baseline";
  figure.x_label = "model";
  figure.y_label = "speed-up over the baseline";
  Builder builder(figure);
  for (const std::string_view model :
       {"gpt2-4.0B", "gpt2-8.4B", "gpt2-16.6B", "gpt2-24.8B", "gpt2-33.0B"}) {
    Point point;
    point.model = model;
    SI_RETURN_IF_ERROR(builder.speed_ups("", std::string(model), point, kAllMethods));
  }
  return {};
}

Status scaling(Figure& figure) {
  figure.title = "Throughput against the number of devices, GPT-2 4.0B";
  figure.x_label = "devices";
  figure.y_label = "throughput, baseline with one device = 1";
  Builder builder(figure);
  double one_s = 0;
  for (const PaperRow& given : paper_rows()) {
    if (given.group != "scaling") continue;
    Point point;
    point.devices = given.devices;
    point.options = with(given.method);
    SI_ASSIGN_OR_RETURN(FigureRow * row, builder.add("", std::string(method_name(given.method)),
                                                     std::to_string(given.devices), point));
    if (one_s == 0) one_s = row->total_s;  // the first row is the baseline with one device
    row->value = one_s / row->total_s;
    row->paper = 53.7 / given.total_s;
  }
  return {};
}

Status other_gpus(Figure& figure) {
  figure.title = "Other GPUs, ten devices: speed-up over the baseline";
  figure.x_label = "GPU";
  figure.y_label = "speed-up over the baseline";
  Builder builder(figure);
  for (const std::string_view model : {"gpt2-4.0B", "gpt2-8.4B"}) {
    for (const std::string_view machine : {"smartssd-a5000", "smartssd-a100"}) {
      Point point;
      point.model = model;
      point.machine = machine;
      SI_ASSIGN_OR_RETURN(const Machine built, load_machine(machine));
      SI_RETURN_IF_ERROR(builder.speed_ups(std::string(model), built.gpu.name, point, kThree));
    }
  }
  return {};
}

Status other_models(Figure& figure) {
  figure.title = "Other kinds of models, ten devices: speed-up over the baseline";
  figure.x_label = "model";
  figure.y_label = "speed-up over the baseline";
  Builder builder(figure);
  for (const std::string_view model : {"bert-0.34B", "bert-4.0B", "bert-8.3B", "bloom-3B",
                                       "bloom-7.1B", "vit-0.30B", "vit-0.63B"}) {
    Point point;
    point.model = model;
    SI_RETURN_IF_ERROR(builder.speed_ups("", std::string(model), point, kThree));
  }
  return {};
}

Status other_optimizers(Figure& figure) {
  figure.title = "Other optimizers: speed-up over the baseline of the same, GPT-2 4.0B";
  figure.x_label = "optimizer";
  figure.y_label = "speed-up over the baseline";
  Builder builder(figure);
  for (const uint32_t devices : {6u, 10u}) {
    using kernels::UpdateRule;
    for (const UpdateRule rule :
         {UpdateRule::kAdam, UpdateRule::kSgdMomentum, UpdateRule::kAdagrad}) {
      Point point;
      point.devices = devices;
      point.options.rule = rule;
      SI_RETURN_IF_ERROR(builder.speed_ups(fmt::format("{} devices", devices),
                                           std::string(update_rule_name(rule)), point, kThree));
    }
  }
  return {};
}

Status ratios(Figure& figure) {
  figure.title = "Compression ratio: speed-up over the baseline, GPT-2 4.0B";
  figure.x_label = "compressed volume, % of the f32 gradients";
  figure.y_label = "speed-up over the baseline";
  Builder builder(figure);
  for (const uint32_t devices : {6u, 10u}) {
    const std::string panel = fmt::format("{} devices", devices);
    Point point;
    point.devices = devices;
    point.options = with(Method::kBaseline);
    SI_ASSIGN_OR_RETURN(const Ran baseline, run(point));
    point.options.method = Method::kSmartOver;
    SI_ASSIGN_OR_RETURN(FigureRow * none, builder.add(panel, "su+o", "100", point));
    none->value = baseline.times.total_s / none->total_s;
    for (const double percent : {20.0, 10.0, 5.0, 2.0, 1.0}) {
      point.options.method = Method::kSmartComp;
      point.options.ratio = percent / 100;
      SI_ASSIGN_OR_RETURN(FigureRow * row,
                          builder.add(panel, "su+o+c", fmt::format("{:.0f}", percent), point));
      row->value = baseline.times.total_s / row->total_s;
    }
  }
  return {};
}

Status cost(Figure& figure) {
  figure.title = "GFLOPS per dollar, GPT-2 4.0B (prices are assumptions, docs/simulator.md)";
  figure.x_label = "devices";
  figure.y_label = "GFLOPS per $";
  // A plain SSD of the same size; the machine files carry the price of a SmartSSD.
  constexpr double kPlainDrive = 400;
  Builder builder(figure);
  for (const std::string_view machine : {"smartssd-a5000", "smartssd-a100"}) {
    for (const Method method : kThree) {
      for (const uint32_t devices : {1u, 2u, 4u, 6u, 8u, 10u}) {
        Point point;
        point.machine = machine;
        point.devices = devices;
        point.options = with(method);
        SI_ASSIGN_OR_RETURN(FigureRow * row,
                            builder.add(std::string(machine), std::string(method_name(method)),
                                        std::to_string(devices), point));
        const Machine& built = builder.ran().machine;
        const double drive =
            method == Method::kBaseline ? kPlainDrive : built.devices.front().price;
        const double dollars = built.price.host + built.price.gpu + devices * drive;
        const ModelShape& model = builder.ran().model;
        const double flops = 3 * (static_cast<double>(model.layers) * model.layer_forward_flops() +
                                  model.head_forward_flops());
        row->value = flops / row->total_s / 1e9 / dollars;
      }
    }
  }
  return {};
}

Status several_gpus(Figure& figure) {
  figure.title = "Several GPUs behind the devices' link, GPT-2 1.16B, ten devices";
  figure.x_label = "GPUs";
  figure.y_label = "speed-up over the baseline";
  Builder builder(figure);
  for (const uint32_t gpus : {1u, 2u, 3u}) {
    Point point;
    point.model = "gpt2-1.16B";
    point.machine = "smartssd-a4000";
    point.gpus = gpus;
    SI_RETURN_IF_ERROR(builder.speed_ups("", std::to_string(gpus), point, kThree));
  }
  return {};
}

std::string quoted(const std::string& text) {
  return text.find(',') == std::string::npos ? text : "\"" + text + "\"";
}

}  // namespace

std::vector<uint32_t> figure_numbers() { return {kNumbers.begin(), kNumbers.end()}; }

Result<Figure> make_figure(uint32_t number) {
  Figure figure;
  figure.number = number;
  Status (*build)(Figure&) = nullptr;
  switch (number) {
    case 3:
      build = motivation;
      break;
    case 9:
      build = ablation;
      break;
    case 10:
      build = larger_models;
      break;
    case 11:
      build = scaling;
      break;
    case 12:
      build = other_gpus;
      break;
    case 13:
      build = other_models;
      break;
    case 14:
      build = other_optimizers;
      break;
    case 15:
      build = ratios;
      break;
    case 16:
      build = cost;
      break;
    case 17:
      build = several_gpus;
      break;
    default:
      return Status(base::ErrorCode::kNotFound, fmt::format("there is no figure {}", number),
                    fmt::format("Figures: {}.", fmt::join(kNumbers, ", ")));
  }
  SI_RETURN_IF_ERROR(build(figure));
  const bool given = std::any_of(figure.rows.begin(), figure.rows.end(),
                                 [](const FigureRow& row) { return row.paper >= 0; });
  figure.basis = given ? "simulated, beside the paper's points"
                       : "simulated only: of the paper's figure no point is known here, and its "
                         "subject is assumed";
  return figure;
}

std::string figure_to_csv(const Figure& figure) {
  std::string text =
      "figure,panel,series,x,model,gpu,devices,forward_s,backward_s,update_s,total_s,value,paper\n";
  for (const FigureRow& row : figure.rows) {
    text += fmt::format("{},{},{},{},{},{},{},{:.4f},{:.4f},{:.4f},{:.4f},{:.4f},{}\n",
                        figure.number, quoted(row.panel), row.series, row.x, row.model, row.gpu,
                        row.devices, row.forward_s, row.backward_s, row.update_s, row.total_s,
                        row.value, row.paper < 0 ? "" : fmt::format("{:.4f}", row.paper));
  }
  return text;
}

std::string figure_to_json(const Figure& figure) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const FigureRow& row : figure.rows) {
    nlohmann::ordered_json entry{{"panel", row.panel},
                                 {"series", row.series},
                                 {"x", row.x},
                                 {"model", row.model},
                                 {"gpu", row.gpu},
                                 {"devices", row.devices},
                                 {"forward_s", row.forward_s},
                                 {"backward_s", row.backward_s},
                                 {"update_s", row.update_s},
                                 {"total_s", row.total_s},
                                 {"value", row.value}};
    entry["paper"] = row.paper < 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(row.paper);
    if (row.paper_computed_s > 0) {
      entry["paper_forward_s"] = row.paper_forward_s;
      entry["paper_computed_s"] = row.paper_computed_s;
    }
    rows.push_back(std::move(entry));
  }
  const nlohmann::ordered_json all{{"figure", figure.number},
                                   {"title", figure.title},
                                   {"basis", figure.basis},
                                   {"x_label", figure.x_label},
                                   {"y_label", figure.y_label},
                                   {"stacked", figure.stacked},
                                   {"rows", rows}};
  return all.dump(2) + "\n";
}

}  // namespace smartinf::sim
