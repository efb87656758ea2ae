package resource

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/lazy"
)

// Selector chooses devices. It is one of
//
//   - an index, "3", or that of a MIG device, "3:0";
//   - a UUID, "GPU-..." or "MIG-...";
//   - a pattern of the product name, "*H100*".
//
// What chooses a GPU chooses its MIG devices too.
type Selector string

var (
	indexForm = lazy.Regexp(`^[0-9]+(:[0-9]+)?$`)
	uuidForm  = lazy.Regexp(`^(?i:gpu|mig)-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$`)
	uuidStart = lazy.Regexp(`^(?i:gpu|mig)-`)
)

// check says what is wrong with a selector that could never choose anything.
func (s Selector) check() error {
	switch {
	case strings.TrimSpace(string(s)) == "":
		return errors.New("is empty")
	case uuidStart().MatchString(string(s)) && !uuidForm().MatchString(string(s)):
		return fmt.Errorf("%q is not GPU- or MIG- and a UUID", s)
	}
	return nil
}

// matches reports whether the selector chooses the GPU d, or the MIG device m on it if m is not nil.
func (s Selector) matches(d *gpu.Device, m *gpu.MIGDevice) bool {
	text := string(s)
	switch {
	case indexForm().MatchString(text):
		g, instance, isMIG := strings.Cut(text, ":")
		return sameIndex(g, d.Index) && (!isMIG || m != nil && sameIndex(instance, m.Index))
	case uuidStart().MatchString(text):
		return strings.EqualFold(text, d.UUID) || m != nil && strings.EqualFold(text, m.UUID)
	}
	return Pattern(text).Matches(d.Name)
}

func sameIndex(text string, index int) bool {
	n, err := strconv.Atoi(text)
	return err == nil && n == index
}

// Pattern is text in which * stands for any characters and ? for one. It fits a whole name, in upper or lower case; a
// blank and a hyphen are the same, since node labels have product names with hyphens.
type Pattern string

// Matches reports whether the pattern fits the name.
func (p Pattern) Matches(name string) bool { return glob(plain(string(p)), plain(name)) }

func plain(s string) []rune { return []rune(strings.ReplaceAll(strings.ToLower(s), " ", "-")) }

// glob matches in time len(pattern) x len(name) at worst: only the last star is ever tried again.
func glob(pattern, name []rune) bool {
	p, n, star, retry := 0, 0, -1, 0
	for n < len(name) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, retry = p, n
			p++
		case p < len(pattern) && (pattern[p] == '?' || pattern[p] == name[n]):
			p++
			n++
		case star >= 0:
			retry++
			p, n = star+1, retry
		default:
			return false
		}
	}
	for p < len(pattern) && pattern[p] == '*' {
		p++
	}
	return p == len(pattern)
}
