package sim

import (
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Value is a property of a GPU that can be changed: its health or a setting.
type Value struct {
	Name    string
	Meaning string
	max     uint64
}

// Default is the text that resets a value.
const Default = "default"

// The values whose changes the driver reports as events.
const (
	recoveryAction    = "recovery-action"
	eccCorrected      = "ecc-corrected"
	eccUncorrected    = "ecc-uncorrected"
	accountingMode    = "accounting-mode"
	linksDown         = "links-down"
	resetValuesPrefix = "reset-" // they have functions of their own
)

var valueDefinition = regexp.MustCompile(`(?s)VALUE\(\w+, "([^"]+)", \w+, (\w+),\s+"([^"]*)"\)`)

// allValues reads the values from the library's header, the only list of them.
var allValues = sync.OnceValue(func() []Value {
	text, err := librarySources.ReadFile("lib/values.h")
	if err != nil {
		panic(err) // cannot fail: the header is embedded
	}
	limits := map[string]uint64{"UINT32_MAX": math.MaxUint32, "UINT64_MAX": math.MaxUint64}
	var values []Value
	for _, m := range valueDefinition.FindAllStringSubmatch(string(text), -1) {
		limit, ok := limits[m[2]]
		if !ok {
			if limit, err = strconv.ParseUint(m[2], 10, 64); err != nil {
				panic(err)
			}
		}
		values = append(values, Value{Name: m[1], Meaning: m[3], max: limit})
	}
	return values
})

// Values returns the values that Node.Set can change.
func Values() []Value {
	return slices.DeleteFunc(slices.Clone(allValues()), func(v Value) bool {
		return strings.HasPrefix(v.Name, resetValuesPrefix)
	})
}

// valueNames are names for numbers, by value.
var valueNames = map[string]map[string]uint64{
	recoveryAction: {"none": 0, "reset": 1, "reboot": 2, "drain-p2p": 3, "drain-and-reset": 4},
	"fabric-state": {"not-supported": 0, "not-started": 1, "in-progress": 2, "completed": 3},
	"fabric-health": {
		"not-supported": 0, "healthy": 1, "unhealthy": 2, "limited-capacity": 3,
	},
	"compute-mode": {"prohibited": 2, "exclusive-process": 3},
	linksDown:      {"none": 0},
}

// Set changes values of a GPU. Values lists their names; a text is a number, a name for one, or Default. The driver
// reports a new recovery action and new ECC errors as events.
func (n *Node) Set(gpu int, values map[string]string) error { return n.set(gpu, values, true) }

// SetSilently is Set without events.
func (n *Node) SetSilently(gpu int, values map[string]string) error { return n.set(gpu, values, false) }

func (n *Node) set(gpu int, values map[string]string, events bool) error {
	if err := n.checkGPU(gpu); err != nil {
		return err
	}
	g := &n.machine.GPUs[gpu]
	numbers := map[string]*uint64{} // nil: the default
	for name, text := range values {
		if !slices.ContainsFunc(Values(), func(v Value) bool { return v.Name == name }) {
			return invalid("unknown value %q; known are %s", name, strings.Join(valueList(), ", "))
		}
		if err := checkFeature(g, name); err != nil {
			return err
		}
		numbers[name] = nil
		if text == Default {
			continue
		}
		number, err := parseValue(g, name, text)
		if err != nil {
			return err
		}
		numbers[name] = &number
	}
	return n.updateState(func(records []record) ([]record, error) {
		old := valuesOf(records, gpu)
		records = setValues(records, gpu, numbers)
		if events {
			records = addValueEvents(records, gpu, old, valuesOf(records, gpu))
		}
		return records, nil
	})
}

func valueList() []string {
	var names []string
	for _, v := range Values() {
		names = append(names, v.Name)
	}
	return names
}

// Values returns the values of a GPU that gpu-sim or functions of the library have changed.
func (n *Node) Values(gpu int) (map[string]uint64, error) {
	if err := n.checkGPU(gpu); err != nil {
		return nil, err
	}
	records, err := n.readState()
	if err != nil {
		return nil, err
	}
	return valuesOf(records, gpu), nil
}

func valuesOf(records []record, gpu int) map[string]uint64 {
	values := map[string]uint64{}
	for _, r := range records {
		if r.name != "set" || !r.has("gpu", gpu) {
			continue
		}
		for _, p := range r.pairs {
			if number, err := strconv.ParseUint(p.value, 10, 64); err == nil && p.key != "gpu" {
				values[p.key] = number
			}
		}
	}
	return values
}

// setValues replaces values of a GPU. Each has its own record, like those that the library's functions write.
func setValues(records []record, gpu int, numbers map[string]*uint64) []record {
	for _, name := range slices.Sorted(maps.Keys(numbers)) {
		records = without(records, func(r record) bool {
			_, ok := r.get(name)
			return r.name == "set" && r.has("gpu", gpu) && ok
		})
		if number := numbers[name]; number != nil {
			records = append(records, newRecord("set", "gpu", gpu, name, *number))
		}
	}
	return records
}

func addValueEvents(records []record, gpu int, before, after map[string]uint64) []record {
	for _, e := range []struct {
		value    string
		kind     EventType
		happened bool
	}{
		{eccCorrected, EventSingleBitECC, after[eccCorrected] > before[eccCorrected]},
		{eccUncorrected, EventDoubleBitECC, after[eccUncorrected] > before[eccUncorrected]},
		{recoveryAction, EventRecoveryAction, after[recoveryAction] != before[recoveryAction]},
	} {
		if !e.happened {
			continue
		}
		event := Event{GPU: gpu, Type: e.kind}
		if e.kind == EventRecoveryAction {
			event.Data = after[e.value]
		}
		records = addEvent(records, event.record())
	}
	return records
}

func parseValue(g *GPU, name, text string) (number uint64, err error) {
	if number, ok := valueNames[name][text]; ok {
		return number, nil
	}
	switch {
	case name == linksDown:
		number, err = parseLinks(g, text)
	case strings.HasPrefix(name, "memory-"):
		number, err = ParseMemory(text)
	default:
		if number, err = strconv.ParseUint(text, 10, 64); err != nil {
			err = fmt.Errorf("want %s", wantedValue(name))
		}
	}
	if err != nil {
		return 0, invalid("%s=%s: %w", name, text, err)
	}
	limit := allValues()[slices.IndexFunc(allValues(), func(v Value) bool { return v.Name == name })].max
	if strings.HasPrefix(name, "memory-") {
		limit = g.MemoryBytes
	}
	if number > limit {
		return 0, invalid("%s=%s: want at most %d", name, text, limit)
	}
	return number, nil
}

func wantedValue(name string) string {
	names := slices.Sorted(maps.Keys(valueNames[name]))
	return strings.Join(append(names, "a number", Default), ", ")
}

// parseLinks returns the bits of a list of ports.
func parseLinks(g *GPU, text string) (bits uint64, err error) {
	var ports []string
	for _, l := range g.NVLinks {
		port := strconv.Itoa(l.Port)
		ports = append(ports, port)
		if text == "all" {
			bits |= 1 << l.Port
		}
	}
	if text == "all" {
		return bits, nil
	}
	for port := range strings.SplitSeq(text, ",") {
		if !slices.Contains(ports, port) {
			return 0, fmt.Errorf("GPU %d has no NVLink %q; it has %s", g.Index, port, strings.Join(ports, ", "))
		}
		number, _ := strconv.Atoi(port)
		bits |= 1 << number
	}
	return bits, nil
}

// ParseMemory returns the bytes of an amount of memory: a number of bytes, or one followed by MiB or GiB.
func ParseMemory(text string) (uint64, error) {
	digits := strings.TrimRight(text, "MGiB")
	unit, ok := map[string]uint64{"": 1, "MiB": mib, "GiB": 1 << 30}[text[len(digits):]]
	number, err := strconv.ParseUint(digits, 10, 64)
	if err != nil || !ok || number > math.MaxUint64/unit {
		return 0, fmt.Errorf("%q is not an amount of memory such as 81559MiB", text)
	}
	return number * unit, nil
}

// checkFeature returns an error if GPUs of the model do not have the value.
func checkFeature(g *GPU, name string) error {
	ampere := architectures[g.Architecture] >= architectures["ampere"]
	dataCenter := !regexp.MustCompile(`GeForce|RTX|Quadro`).MatchString(g.Name)
	switched := slices.ContainsFunc(g.NVLinks, func(l NVLink) bool { return l.Switch })
	for _, feature := range []struct {
		prefix string
		what   string
		has    bool
	}{
		{"ecc-", "ECC", dataCenter},
		{"remap", "remapped rows", dataCenter && ampere},
		{"retire", "retired pages", dataCenter && !ampere},
		{linksDown, "NVLinks", len(g.NVLinks) > 0},
		{"fabric-", "an NVSwitch fabric", switched && architectures[g.Architecture] >= architectures["hopper"]},
		{"application-clock-", "application clocks", dataCenter},
	} {
		if strings.HasPrefix(name, feature.prefix) && !feature.has {
			return invalid("%s: GPU %d (%s) has no %s", name, g.Index, g.Name, feature.what)
		}
	}
	return nil
}
