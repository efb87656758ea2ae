package nodestatus

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager/quantity"
)

// ErrReserved means that a reservation is malformed.
var ErrReserved = errors.New("invalid reservation")

// Reserved says how much of a machine's resources pods cannot have. The zero value reserves nothing.
type Reserved struct {
	amounts  map[string]quantity.Quantity // by resource, for the system and Kubernetes together
	eviction map[string]threshold         // by resource
}

// threshold is a quantity or, if that is 0, a fraction of the capacity.
type threshold struct {
	quantity quantity.Quantity
	part     float32
}

// ParseReserved parses three options of the kubelet: system-reserved and kube-reserved have items like cpu=500m, and
// eviction-hard has items like memory.available<100Mi or nodefs.available<10%. Other eviction signals reserve nothing.
// The error wraps ErrReserved and has all problems.
func ParseReserved(system, kube, evictionHard []string) (Reserved, error) {
	r := Reserved{amounts: map[string]quantity.Quantity{}, eviction: map[string]threshold{}}
	var problems []error
	problem := func(option, item string, err error) {
		if err != nil {
			problems = append(problems, fmt.Errorf("%w: %s: %q: %w", ErrReserved, option, item, err))
		}
	}
	seen := map[string]bool{} // each option together with a resource or signal
	once := func(option, name string) error {
		if seen[option+name] {
			return fmt.Errorf("%s is given twice", name)
		}
		seen[option+name] = true
		return nil
	}
	for _, option := range []struct {
		name  string
		items []string
	}{{"system-reserved", system}, {"kube-reserved", kube}} {
		for _, item := range option.items {
			name, amount, err := parseAmount(item)
			if err == nil {
				err = once(option.name, name)
			}
			problem(option.name, item, err)
			r.amounts[name] = r.amounts[name].Add(amount)
		}
	}
	for _, item := range evictionHard {
		signal, t, err := parseThreshold(item)
		if err == nil {
			err = once("eviction-hard", signal)
		}
		problem("eviction-hard", item, err)
		if resource := signals[signal]; resource != "" {
			r.eviction[resource] = t
		}
	}
	if err := errors.Join(problems...); err != nil {
		return Reserved{}, err
	}
	return r, nil
}

// reservable are the resources that the kubelet can reserve. The kubelet can also reserve process IDs, which are not
// in the status of a Node.
var reservable = []string{"cpu", "memory", "ephemeral-storage", "pid"}

func parseAmount(item string) (name string, amount quantity.Quantity, err error) {
	name, value, ok := strings.Cut(item, "=")
	switch {
	case !ok:
		return name, amount, errors.New("want RESOURCE=QUANTITY")
	case !slices.Contains(reservable, name):
		return name, amount, fmt.Errorf("cannot reserve %q resource%s", name, wording.Question(name, reservable))
	}
	if amount, err = quantity.Parse(value); err != nil {
		return name, amount, err
	}
	if amount.Sign() < 0 {
		return name, amount, fmt.Errorf("resource quantity for %q cannot be negative: %s", name, value)
	}
	return name, amount, nil
}

// signals are the kubelet's eviction signals, with the resources that their hard thresholds reserve.
var signals = map[string]string{
	"memory.available": "memory", "nodefs.available": "ephemeral-storage",
	"allocatableMemory.available": "", "nodefs.inodesFree": "", "imagefs.available": "", "imagefs.inodesFree": "",
	"containerfs.available": "", "containerfs.inodesFree": "", "pid.available": "",
}

func parseThreshold(item string) (signal string, t threshold, err error) {
	signal, value, ok := strings.Cut(item, "<")
	if !ok {
		return signal, t, errors.New("want SIGNAL<QUANTITY or SIGNAL<PERCENT%")
	}
	if _, known := signals[signal]; !known {
		names := slices.Sorted(maps.Keys(signals))
		return signal, t, fmt.Errorf("unknown signal %q%s", signal, wording.Question(signal, names))
	}
	if number, ok := strings.CutSuffix(value, "%"); ok {
		percent, err := strconv.ParseFloat(number, 32)
		if err != nil || !(percent >= 0 && percent <= 100) {
			return signal, t, fmt.Errorf("want a percentage from 0%% to 100%%, got %s", value)
		}
		if percent < 100 { // the kubelet ignores 100%
			t.part = float32(percent) / 100
		}
		return signal, t, nil
	}
	if t.quantity, err = quantity.Parse(value); err == nil && t.quantity.Sign() <= 0 {
		err = fmt.Errorf("eviction threshold %s must be positive: %s", signal, value)
	}
	return signal, t, err
}
