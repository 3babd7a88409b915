#include "tests/emulated_gpu/compiler/rewrite.h"

#include <cctype>
#include <vector>

namespace emulated {
namespace {

bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}

std::string trimmed(std::string text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())) != 0) text.pop_back();
  size_t first = 0;
  while (first < text.size() && std::isspace(static_cast<unsigned char>(text[first])) != 0) ++first;
  return text.substr(first);
}

// Where the bracket at `open` closes.
size_t closing(const std::string& text, size_t open) {
  int depth = 0;
  for (size_t i = open; i < text.size(); ++i) {
    if (text[i] == '(' || text[i] == '[' || text[i] == '{') ++depth;
    if ((text[i] == ')' || text[i] == ']' || text[i] == '}') && --depth == 0) return i;
  }
  return std::string::npos;
}

bool is_in_comment(const std::string& text, size_t at) {
  const size_t line = text.rfind('\n', at) + 1;
  return text.find("//", line) < at;
}

// "__align__(16)" or "alignas(16)" in front of a declaration.
std::string take_alignment(std::string& declaration) {
  for (const char* word : {"__align__", "alignas"}) {
    if (declaration.rfind(word, 0) != 0) continue;
    const size_t open = declaration.find('('), close = closing(declaration, open);
    std::string alignment = declaration.substr(open + 1, close - open - 1);
    declaration = trimmed(declaration.substr(close + 1));
    return alignment;
  }
  return "1";
}

// The parts between commas that stand in no bracket; of <> too.
std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (const char c : text) {
    if (c == '(' || c == '[' || c == '{' || c == '<') ++depth;
    if (c == ')' || c == ']' || c == '}' || c == '>') --depth;
    if (c == ',' && depth == 0) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

struct Declarator {
  std::string type;  // what stands in front of the name
  std::string name;
  std::string bounds;  // "[2][n]"
};

Declarator read_declarator(const std::string& text) {
  size_t name_end = text.size();
  int depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '[' && depth == 0) {
      name_end = i;
      break;
    }
    if (text[i] == '<' || text[i] == '(') ++depth;
    if (text[i] == '>' || text[i] == ')') --depth;
  }
  Declarator declarator;
  declarator.bounds = text.substr(name_end);
  std::string head = trimmed(text.substr(0, name_end));
  size_t name = head.size();
  while (name > 0 && is_word(head[name - 1])) --name;
  declarator.name = head.substr(name);
  declarator.type = trimmed(head.substr(0, name));
  return declarator;
}

std::string shared_declaration(std::string declaration, bool is_extern, int number) {
  const std::string alignment = take_alignment(declaration);
  const std::vector<std::string> parts = split(declaration);
  std::string result, type;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Declarator declarator = read_declarator(trimmed(parts[i]));
    if (i == 0) type = declarator.type;
    if (is_extern) return "auto* " + declarator.name + " = emulated_dynamic_shared<" + type + ", " + alignment + ">();";
    const std::string suffix = std::to_string(number) + "_" + std::to_string(i);
    result += "struct emulated_tag_" + suffix + " {}; using emulated_type_" + suffix + " = " + type +
              declarator.bounds + "; auto& " + declarator.name + " = emulated_static_shared<emulated_type_" + suffix +
              ", emulated_tag_" + suffix + ", " + alignment + ">(); ";
  }
  return result;
}

std::string rewrite_shared(const std::string& source) {
  constexpr const char kWord[] = "__shared__";
  std::string result;
  size_t done = 0;
  int number = 0;
  for (size_t at = source.find(kWord); at != std::string::npos; at = source.find(kWord, at + 1)) {
    if (is_in_comment(source, at) || at < done) continue;
    size_t begin = at;
    const std::string before = trimmed(source.substr(done, at - done));
    const bool is_extern = before.size() >= 6 && before.compare(before.size() - 6, 6, "extern") == 0;
    if (is_extern) begin = source.rfind("extern", at);
    const size_t end = source.find(';', at);
    result += source.substr(done, begin - done);
    result += shared_declaration(trimmed(source.substr(at + sizeof(kWord) - 1, end - at - sizeof(kWord) + 1)),
                                 is_extern, ++number);
    done = end + 1;
  }
  return result + source.substr(done);
}

std::string rewrite_waits(const std::string& source) {
  std::string result;
  size_t done = 0;
  for (size_t at = source.find("while ("); at != std::string::npos; at = source.find("while (", at + 1)) {
    if (is_in_comment(source, at) || (at > 0 && is_word(source[at - 1]))) continue;
    const size_t close = closing(source, at + 6);
    if (close == std::string::npos) break;
    size_t open = close + 1;
    while (open < source.size() && std::isspace(static_cast<unsigned char>(source[open])) != 0) ++open;
    if (open >= source.size() || source[open] != '{') continue;
    size_t end = open + 1;
    while (end < source.size() && std::isspace(static_cast<unsigned char>(source[end])) != 0) ++end;
    if (end >= source.size() || source[end] != '}') continue;
    result += source.substr(done, open + 1 - done) + " emulated_spin(); ";
    done = open + 1;
  }
  return result + source.substr(done);
}

}  // namespace

std::string rewrite(const std::string& source) {
  return rewrite_waits(rewrite_shared(source));
}

}  // namespace emulated
