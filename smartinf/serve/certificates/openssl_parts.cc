#include "smartinf/serve/certificates/openssl_parts.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <ctime>

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/pem.h>

#include "smartinf/base/file.h"

namespace smartinf::serve {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

Bio memory(std::string_view text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// A key with a password is not asked for it: a server starts without anybody at the keyboard.
int no_password(char*, int, int, void*) { return -1; }

std::string text_of(const ASN1_STRING* string) {
  return {reinterpret_cast<const char*>(ASN1_STRING_get0_data(string)),
          static_cast<size_t>(ASN1_STRING_length(string))};
}

std::string common_name(X509* certificate) {
  const X509_NAME* subject = X509_get_subject_name(certificate);
  const int at = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (at < 0) return {};
  return text_of(X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, at)));
}

std::vector<std::string> addresses_of(X509* certificate) {
  std::vector<std::string> addresses;
  const std::unique_ptr<GENERAL_NAMES, OpensslFree<GENERAL_NAMES_free>> names(
      static_cast<GENERAL_NAMES*>(
          X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; names != nullptr && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type == GEN_DNS) {
      addresses.push_back(text_of(name->d.dNSName));
    } else if (name->type == GEN_IPADD) {
      const std::string bytes = text_of(name->d.iPAddress);
      std::array<char, INET6_ADDRSTRLEN> text{};
      const int family = bytes.size() == 4 ? AF_INET : AF_INET6;
      if ((bytes.size() == 4 || bytes.size() == 16) &&
          ::inet_ntop(family, bytes.data(), text.data(), text.size()) != nullptr) {
        addresses.emplace_back(text.data());
      }
    }
  }
  return addresses;
}

}  // namespace

Status openssl_status(ErrorCode code, std::string what, std::string advice,
                      const std::string& path) {
  std::array<char, 256> reason{};
  if (const unsigned long error = ERR_get_error(); error != 0) {
    ERR_error_string_n(error, reason.data(), reason.size());
    what += ": OpenSSL says " + std::string(reason.data());
  }
  ERR_clear_error();
  return Status(code, std::move(what), std::move(advice), base::ErrorPlace{path, {}, {}, 0});
}

Certificate parse_certificate(std::string_view pem) {
  if (pem.size() > kPemBytesMax) return nullptr;
  Certificate parsed(PEM_read_bio_X509(memory(pem).get(), nullptr, no_password, nullptr));
  ERR_clear_error();
  return parsed;
}

PrivateKey parse_key(std::string_view pem) {
  if (pem.size() > kPemBytesMax) return nullptr;
  PrivateKey parsed(PEM_read_bio_PrivateKey(memory(pem).get(), nullptr, no_password, nullptr));
  ERR_clear_error();
  return parsed;
}

Crl parse_crl(std::string_view pem) {
  if (pem.size() > kCrlBytesMax) return nullptr;
  Crl parsed(PEM_read_bio_X509_CRL(memory(pem).get(), nullptr, no_password, nullptr));
  ERR_clear_error();
  return parsed;
}

Result<Certificate> read_certificate(const std::string& path) {
  SI_ASSIGN_OR_RETURN(const std::string pem,
                      base::read_text_file(path, "cannot read the certificate", kPemBytesMax));
  Certificate certificate = parse_certificate(pem);
  if (certificate == nullptr) {
    return Status(ErrorCode::kCorrupt, "there is no certificate in the file",
                  "It must be a certificate in PEM form, as smartinf certificates makes them.",
                  base::ErrorPlace{path, {}, {}, 0});
  }
  return certificate;
}

std::string serial_text(const ASN1_INTEGER* serial) {
  const Number number(ASN1_INTEGER_to_BN(serial, nullptr));
  char* hex = number == nullptr ? nullptr : BN_bn2hex(number.get());
  if (hex == nullptr) return {};
  std::string text(hex);
  OPENSSL_free(hex);
  std::ranges::transform(text, text.begin(), [](char c) {
    return static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  });
  return text;
}

int64_t seconds_of(const ASN1_TIME* time) {
  std::tm calendar{};
  return ASN1_TIME_to_tm(time, &calendar) == 1 ? ::timegm(&calendar) : 0;
}

CertificateFacts facts_of(X509* certificate) {
  CertificateFacts facts;
  facts.role = (X509_get_extended_key_usage(certificate) & XKU_SSL_SERVER) != 0
                   ? CertificateRole::kServer
                   : CertificateRole::kClient;
  facts.name = common_name(certificate);
  facts.addresses = addresses_of(certificate);
  facts.serial = serial_text(X509_get0_serialNumber(certificate));
  facts.from_s = seconds_of(X509_get0_notBefore(certificate));
  facts.until_s = seconds_of(X509_get0_notAfter(certificate));
  return facts;
}

Result<CertificateFacts> certificate_facts(std::string_view certificate_pem) {
  const Certificate certificate = parse_certificate(certificate_pem);
  if (certificate == nullptr) {
    return Status(ErrorCode::kCorrupt, "this is no certificate in PEM form");
  }
  return facts_of(certificate.get());
}

Result<std::string> client_name(std::string_view certificate_pem) {
  const Certificate certificate = parse_certificate(certificate_pem);
  if (certificate == nullptr) {
    return Status(ErrorCode::kCorrupt, "this is no certificate in PEM form");
  }
  const auto wrong = [](const char* what) {
    return Status(ErrorCode::kPermissionDenied, what,
                  "smartinf certificates --client NAME makes one that is right.");
  };
  // Without the extension it is UINT32_MAX: for everything, which is more than was asked for.
  const uint32_t uses = X509_get_extended_key_usage(certificate.get());
  if (uses == UINT32_MAX || (uses & XKU_SSL_CLIENT) == 0) {
    return wrong("the certificate does not say that it is for clients (clientAuth)");
  }
  const X509_NAME* subject = X509_get_subject_name(certificate.get());
  const int first = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (first < 0 || X509_NAME_get_index_by_NID(subject, NID_commonName, first) >= 0) {
    return wrong("the certificate has no common name, or more than one");
  }
  std::string name = common_name(certificate.get());
  const bool printable =
      std::ranges::none_of(name, [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  if (name.empty() || name.size() > 64 || !printable) {
    return wrong("the certificate's common name is not a text of 1 to 64 bytes");
  }
  return name;
}

}  // namespace smartinf::serve
