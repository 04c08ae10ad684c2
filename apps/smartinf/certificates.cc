// `smartinf certificates`: makes, lists and revokes what the two sides of a remote device show each
// other.
#include "smartinf/serve/certificates/certificates.h"

#include <cstdio>
#include <ctime>
#include <filesystem>
#include <memory>

#include <fmt/format.h>

#include "apps/smartinf/commands.h"

namespace smartinf::apps {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using serve::CertificateAuthority;
using serve::CertificateFacts;
using serve::CertificateRole;

struct CertificatesFlags {
  std::string folder;
  std::vector<std::string> servers;
  std::vector<std::string> clients;
  std::vector<std::string> addresses;
  uint32_t days = serve::kCertificateDays;
  std::vector<std::string> revoke;
  bool list = false;
};

/// Days before its end from which the list points at a certificate.
constexpr int64_t kSoonDays = 30;

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

std::string condition(const CertificateFacts& facts) {
  const int64_t now = ::time(nullptr);
  if (facts.revoked_s) return "revoked " + serve::utc_text(*facts.revoked_s);
  if (facts.until_s <= now) return "expired";
  if (facts.from_s > now) return "valid from " + serve::utc_text(facts.from_s);
  const int64_t days = (facts.until_s - now) / 86400;
  return days < kSoonDays ? fmt::format("expires in {} days", days) : "valid";
}

int list(const CertificateAuthority& authority, const std::string& folder) {
  const auto issued = authority.issued();
  if (!issued.ok()) return report(issued.status());
  std::printf("authority in %s, valid until %s\n", folder.c_str(),
              serve::utc_text(authority.until_s()).c_str());
  size_t width = 4;
  for (const CertificateFacts& facts : *issued) width = std::max(width, facts.name.size());
  if (!issued->empty()) {
    fmt::print("{:<6}  {:<{}}  {:<20}  {:<32}  {}\n", "for", "name", width, "valid until", "serial",
               "condition");
  }
  for (const CertificateFacts& facts : *issued) {
    fmt::print("{:<6}  {:<{}}  {:<20}  {:<32}  {}\n", serve::certificate_role_name(facts.role),
               facts.name, width, serve::utc_text(facts.until_s), facts.serial, condition(facts));
  }
  return kExitDone;
}

int revoke(CertificateAuthority& authority, const CertificatesFlags& flags) {
  for (const std::string& name : flags.revoke) {
    const auto revoked = authority.revoke(name);
    if (!revoked.ok()) return report(revoked.status());
    for (const CertificateFacts& facts : *revoked) {
      std::printf("revoked: %s %s, serial %s\n",
                  std::string(serve::certificate_role_name(facts.role)).c_str(), facts.name.c_str(),
                  facts.serial.c_str());
    }
  }
  const std::filesystem::path crl = std::filesystem::path(flags.folder) / "revoked.crl";
  std::printf("Copy %s to every server; it is read again when it changes.\n", crl.c_str());
  return kExitDone;
}

/// What is wrong with the words is found before anything is made.
Status check(const CertificatesFlags& flags) {
  for (const std::string& name : flags.servers) {
    SI_RETURN_IF_ERROR(serve::check_certificate_name(CertificateRole::kServer, name));
  }
  for (const std::string& name : flags.clients) {
    SI_RETURN_IF_ERROR(serve::check_certificate_name(CertificateRole::kClient, name));
  }
  for (const std::string& address : flags.addresses) {
    SI_RETURN_IF_ERROR(serve::check_certificate_name(CertificateRole::kServer, address));
  }
  if (!flags.addresses.empty() && flags.servers.size() != 1) {
    return Status(ErrorCode::kInvalidArgument, "--address is for one --server",
                  "Make the certificates of several servers one after another.");
  }
  if (flags.days < 1 || flags.days > serve::kAuthorityDays) {
    return Status(ErrorCode::kInvalidArgument, fmt::format("--days is {}", flags.days),
                  fmt::format("Choose 1 to {}.", serve::kAuthorityDays));
  }
  const bool make = !flags.servers.empty() || !flags.clients.empty();
  if (static_cast<int>(make) + static_cast<int>(flags.list) +
          static_cast<int>(!flags.revoke.empty()) !=
      1) {
    return Status(ErrorCode::kInvalidArgument,
                  "one of these is needed: --server and --client, --list, or --revoke",
                  "See smartinf certificates --help.");
  }
  return Status();
}

int make(CertificateAuthority& authority, const CertificatesFlags& flags) {
  if (authority.made()) {
    std::printf("made the authority in %s, valid until %s\n", flags.folder.c_str(),
                serve::utc_text(authority.until_s()).c_str());
  }
  std::vector<serve::CertificateRequest> requests;
  for (const std::string& name : flags.servers) {
    requests.push_back({CertificateRole::kServer, name, flags.addresses, flags.days});
  }
  for (const std::string& name : flags.clients) {
    requests.push_back({CertificateRole::kClient, name, {}, flags.days});
  }
  for (const serve::CertificateRequest& request : requests) {
    const Result<CertificateFacts> made = authority.issue(request);
    if (!made.ok()) return report(made.status());
    const std::string addresses = joined(made->addresses);
    std::printf("%s %s, valid until %s%s%s: %s/\n",
                std::string(serve::certificate_role_name(made->role)).c_str(), made->name.c_str(),
                serve::utc_text(made->until_s).c_str(), addresses.empty() ? "" : ", reached as ",
                addresses.c_str(), authority.folder_of(request.role, request.name).c_str());
  }
  return kExitDone;
}

int run_certificates(const CertificatesFlags& flags) {
  if (const Status status = check(flags); !status.ok()) return report(status, kExitUsage);
  const bool making = !flags.servers.empty() || !flags.clients.empty();
  Result<CertificateAuthority> authority = making ? CertificateAuthority::open_or_make(flags.folder)
                                                  : CertificateAuthority::open(flags.folder);
  if (!authority.ok()) return report(authority.status());
  if (flags.list) return list(*authority, flags.folder);
  return making ? make(*authority, flags) : revoke(*authority, flags);
}

}  // namespace

void add_certificates(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand(
      "certificates", "Make certificates for servers and users of remote devices");
  auto flags = std::make_shared<CertificatesFlags>();
  command->add_option("--ca", flags->folder, "Folder of the authority; made when it is not there")
      ->required()
      ->type_name("DIR");
  command
      ->add_option("--server", flags->servers,
                   "Make a server's certificate: the name or address that clients connect to")
      ->type_name("NAME");
  command
      ->add_option("--address", flags->addresses,
                   "A further name or address of the server, such as 10.0.0.5 or localhost")
      ->type_name("NAME");
  command
      ->add_option("--client", flags->clients,
                   "Make a client's certificate: the name that the server's list of clients has")
      ->type_name("NAME");
  command->add_option("--days", flags->days, "Days for which the certificates are valid [365]")
      ->type_name("N");
  command->add_flag("--list", flags->list,
                    "List what was issued, what expired and what is revoked");
  command
      ->add_option("--revoke", flags->revoke,
                   "Revoke all certificates of a name, or the one with a serial number")
      ->type_name("NAME");
  command->footer(
      "Each certificate is put into DIR/servers/NAME/ or DIR/clients/NAME/ with its key and the\n"
      "authority's certificate: copy that folder to the machine. DIR itself stays where nobody "
      "else\n"
      "can read it. Nothing is overwritten: to renew, remove the folder of a name first.\n\n"
      "Examples:\n"
      "  smartinf certificates --ca ~/ca --server nas --address 10.0.0.5 --client gpu1 --client "
      "gpu2\n"
      "  smartinf certificates --ca ~/ca --list\n"
      "  smartinf certificates --ca ~/ca --revoke gpu2");
  command->callback([flags, &run] { run = [flags] { return run_certificates(*flags); }; });
}

}  // namespace smartinf::apps
