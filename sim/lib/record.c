// The format of descriptions and state files: a record a line, "type key=value key=value", values percent-encoded.
// Malformed text is ignored: lines that are too long, too many keys, malformed numbers.
#define _GNU_SOURCE
#include "sim.h"

#include <stdlib.h>
#include <string.h>

enum { LINE_SIZE = 4096, MAX_PAIRS = 64 };

struct record {
    size_t count;
    const char *type;
    const char *keys[MAX_PAIRS];
    const char *values[MAX_PAIRS];
    char line[LINE_SIZE];
};

struct record *record_new(void) { return calloc(1, sizeof(struct record)); }

void record_free(struct record *r) { free(r); }

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

// Decodes in place. Malformed escapes and an escaped NUL are not decoded.
static void percent_decode(char *text)
{
    char *to = text;
    for (const char *from = text; *from != '\0'; to++) {
        int high = from[0] == '%' ? hex_digit(from[1]) : -1;
        int low = high >= 0 ? hex_digit(from[2]) : -1;
        if (low >= 0 && high + low > 0) {
            *to = (char)(high << 4 | low);
            from += 3;
        } else {
            *to = *from++;
        }
    }
    *to = '\0';
}

static void split(struct record *r)
{
    char *rest = r->line;
    char *word = strtok_r(rest, " \t\r", &rest);
    r->type = word != NULL ? word : "";
    r->count = 0;
    while (r->count < MAX_PAIRS && (word = strtok_r(NULL, " \t\r", &rest)) != NULL) {
        char *equals = strchr(word, '=');
        if (equals == NULL)
            continue;
        *equals = '\0';
        percent_decode(equals + 1);
        r->keys[r->count] = word;
        r->values[r->count++] = equals + 1;
    }
}

// Reads the next line that is not too long; false at the end of the text, which is a NUL or the given end.
bool record_next(struct record *r, const char **cursor, const char *end)
{
    while (*cursor < end && **cursor != '\0') {
        const char *start = *cursor;
        size_t length = 0;
        while (start + length < end && start[length] != '\n' && start[length] != '\0')
            length++;
        *cursor = start + length + (start + length < end && start[length] == '\n');
        if (length >= LINE_SIZE)
            continue;
        memcpy(r->line, start, length);
        r->line[length] = '\0';
        split(r);
        return true;
    }
    return false;
}

bool record_is(const struct record *r, const char *type) { return strcmp(r->type, type) == 0; }

// The value of a key, or NULL. If a key occurs twice, the first value counts.
const char *record_string(const struct record *r, const char *key)
{
    for (size_t i = 0; i < r->count; i++)
        if (strcmp(r->keys[i], key) == 0)
            return r->values[i];
    return NULL;
}

// An integer, decimal or 0x hexadecimal, of at most max. False: absent or not such a number.
bool record_number(const struct record *r, const char *key, uint64_t max, uint64_t *value)
{
    const char *text = record_string(r, key);
    if (text == NULL || text[0] < '0' || text[0] > '9')
        return false;
    int base = 10;
    if (text[0] == '0' && (text[1] == 'x' || text[1] == 'X')) {
        base = 16;
        text += 2;
    }
    uint64_t number = 0;
    const char *start = text;
    for (; *text != '\0'; text++) {
        int digit = hex_digit(*text);
        if (digit < 0 || digit >= base || (uint64_t)digit > max || number > (max - (uint64_t)digit) / (uint64_t)base)
            return false;
        number = number * (uint64_t)base + (uint64_t)digit;
    }
    if (text == start)
        return false;
    *value = number;
    return true;
}

// Copies a value if it is present and fits.
bool record_text(const struct record *r, const char *key, char *to, size_t size)
{
    const char *text = record_string(r, key);
    if (text == NULL || strlen(text) >= size)
        return false;
    memcpy(to, text, strlen(text) + 1);
    return true;
}

void record_uint(const struct record *r, const char *key, unsigned int *to)
{
    uint64_t value;
    if (record_number(r, key, UINT32_MAX, &value))
        *to = (unsigned int)value;
}
