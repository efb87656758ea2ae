package resource

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
)

// Selector selects devices. It is one of
//
//   - an index, "3", or that of a MIG device, "3:0";
//   - a UUID, "GPU-..." or "MIG-...";
//   - a pattern of the product name, "*H100*".
//
// A selector that selects a GPU also selects its MIG devices.
type Selector string

// Validate returns an error if the selector can never match.
func (s Selector) Validate() error {
	uuid, isUUID := s.uuid()
	switch {
	case strings.TrimSpace(string(s)) == "":
		return errors.New("is empty")
	case isUUID && !gpu.IsUUID(uuid):
		return fmt.Errorf("%q is not GPU- or MIG- followed by a UUID", s)
	}
	return nil
}

// uuid returns the part after GPU- or MIG-, in upper or lower case, and whether the selector begins like that.
func (s Selector) uuid() (string, bool) {
	for _, prefix := range []string{"GPU-", "MIG-"} {
		if n := len(prefix); len(s) >= n && strings.EqualFold(string(s[:n]), prefix) {
			return string(s[n:]), true
		}
	}
	return "", false
}

// matches reports whether the selector selects the GPU d, or the MIG device m on it if m is not nil.
func (s Selector) matches(d *gpu.Device, m *gpu.MIGDevice) bool {
	text := string(s)
	gpuText, migText, isMIG := strings.Cut(text, ":")
	gpuIndex, err := strconv.ParseUint(gpuText, 10, 31)
	if err == nil && !isMIG {
		return int(gpuIndex) == d.Index
	}
	if migIndex, migErr := strconv.ParseUint(migText, 10, 31); err == nil && migErr == nil {
		return int(gpuIndex) == d.Index && m != nil && int(migIndex) == m.Index
	}
	if _, isUUID := s.uuid(); isUUID {
		return strings.EqualFold(text, d.UUID) || m != nil && strings.EqualFold(text, m.UUID)
	}
	return Pattern(text).matches(d.Name)
}

// Pattern is a text in which * matches any text and ? any character. It must match a whole name. Upper and lower case
// are the same, and so are spaces and hyphens, since product names have hyphens in node labels.
type Pattern string

// matches reports whether the pattern matches the name.
func (p Pattern) matches(name string) bool {
	expr := strings.NewReplacer(`\*`, `.*`, `\?`, `.`).Replace(regexp.QuoteMeta(foldName(string(p))))
	return regexp.MustCompile(`(?s)^` + expr + `$`).MatchString(foldName(name))
}

func foldName(s string) string {
	return strings.ToValidUTF8(strings.ReplaceAll(strings.ToLower(s), " ", "-"), "\uFFFD")
}
