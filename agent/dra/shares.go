package dra

import (
	"fmt"
	"strconv"
	"strings"
)

// memory is the name of the capacity that claims share, in the slices and in the results of the scheduler.
const memory = "memory"

// leastShare is the least memory of a share, in bytes, and shareStep the unit by which shares differ. With large units,
// the rest of the memory beside the default shares could be enough for another one.
const (
	leastShare = 1 << 20
	shareStep  = 1 << 10
)

// defaultShare returns the memory of a claim that does not say how much it needs, in bytes: as many claims fit as the
// device has replicas, and no more.
func (o *offer) defaultShare() uint64 {
	return o.device.MemoryBytes / uint64(o.replicas) / shareStep * shareStep
}

// share lets several claims have a device. The scheduler counts their memory, and nothing limits what their containers
// use: this is what the attribute says.
func (d *Device) share(o *offer) {
	n := int64(o.replicas)
	d.Shared = true
	d.addString("sharing", "time-slicing")
	d.Attributes["replicas"] = Attribute{Int: &n}
	c := d.Capacity[memory]
	c.Policy = &RequestPolicy{
		Default: quantity(o.defaultShare()), Range: Range{Min: quantity(leastShare), Step: quantity(shareStep)},
	}
	d.Capacity[memory] = c
}

// shared returns the memory that the scheduler has given a claim of a device, in bytes, or 0 if it has given the whole
// device.
func (r *result) shared() (uint64, error) {
	if r.ShareID == "" {
		return 0, nil
	}
	n, err := parseQuantity(r.Consumed.Memory)
	if err == nil && n == 0 {
		err = fmt.Errorf("it is 0")
	}
	if err != nil {
		return 0, fmt.Errorf("read how much memory of the device %s it has: %w", r.Device, err)
	}
	return n, nil
}

var units = []string{"Ki", "Mi", "Gi", "Ti", "Pi"}

// quantity returns a number of bytes, rounded down to KiB, in the form in which the API server returns it.
func quantity(bytes uint64) string {
	n, unit := bytes>>10, 0
	for n > 0 && n%1024 == 0 && unit < len(units)-1 {
		n, unit = n/1024, unit+1
	}
	return strconv.FormatUint(n, 10) + units[unit]
}

// parseQuantity returns the bytes of a quantity that the scheduler has rounded to a share: a whole number of a unit.
func parseQuantity(text string) (uint64, error) {
	digits, shift := text, 0
	for i, unit := range units {
		if number, has := strings.CutSuffix(text, unit); has {
			digits, shift = number, 10*(i+1)
		}
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	switch {
	case err != nil:
		return 0, fmt.Errorf("%q is no whole number of bytes, or of a unit from Ki to Pi", text)
	case n<<shift>>shift != n:
		return 0, fmt.Errorf("%q is too much", text)
	}
	return n << shift, nil
}
