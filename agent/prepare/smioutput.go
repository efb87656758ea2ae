package prepare

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
)

// statusNotSupported is nvidia-smi's exit status for "the requested operation is not available on target device" (its
// manual, RETURN VALUE).
const statusNotSupported = 3

// resetTexts are texts in the line that nvidia-smi prints about a GPU which was not reset, in lower case. They were
// reported for drivers from 418 to 580. For most of them the exit status is 255.
var resetTexts = []struct {
	text    string
	outcome Outcome
}{
	{"in use by another client", ResetBusy},
	{"currently in use by another process", ResetBusy},
	{"being used by some other process", ResetBusy},
	{"currently being used by one or more other processes", ResetBusy},
	{"is the primary gpu", ResetRefused},
	{"nvlink", ResetRefused},
	{"nvswitch", ResetRefused},
	{"must be reset together", ResetRefused},
	{"not supported", ResetNotSupported},
	{"does not support", ResetNotSupported},
}

// parseReset finds out from the output and exit status of nvidia-smi how the reset of one GPU ended. The form of the
// output is not defined: if a text is unknown, the reset has failed.
func parseReset(output string, status int, address string) (Outcome, error) {
	var own, general []string // lines that name this GPU, and lines that name none
	for line := range strings.Lines(output) {
		switch this, anyone := mentions(line, address); {
		case this:
			own = append(own, line)
		case !anyone:
			general = append(general, line)
		}
	}
	if len(own) == 0 {
		own = general
	}
	for _, line := range own {
		lower := strings.ToLower(line)
		if strings.Contains(lower, "successfully reset") {
			return ResetDone, nil
		}
		for _, row := range resetTexts {
			if strings.Contains(lower, row.text) {
				return row.outcome, errors.New("nvidia-smi: " + plain(line))
			}
		}
	}
	switch status {
	case 0:
		return ResetDone, nil
	case statusNotSupported:
		return ResetNotSupported, fmt.Errorf("nvidia-smi ended with status %d%s", status, quoted(output))
	default:
		return ResetFailed, fmt.Errorf("nvidia-smi ended with status %d%s", status, quoted(output))
	}
}

// addressPattern matches a PCI address: domain, bus, device and function. NVML and nvidia-smi write 8 digits for the
// domain.
var addressPattern = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])`)
})

// parseAddress returns a PCI address in a form that can be compared.
func parseAddress(text string) (string, bool) {
	m := addressPattern().FindStringSubmatch(text)
	if m == nil || m[0] != text {
		return "", false
	}
	domain, err := strconv.ParseUint(m[1], 16, 32)
	return strings.ToLower(fmt.Sprintf("%x:%s:%s.%s", domain, m[2], m[3], m[4])), err == nil
}

// mentions reports whether a line has the given PCI address (`this`), and whether it has any PCI address (`anyone`).
func mentions(line, address string) (this, anyone bool) {
	want, _ := parseAddress(address)
	for _, found := range addressPattern().FindAllString(line, -1) {
		got, ok := parseAddress(found)
		this, anyone = this || ok && got == want, anyone || ok
	}
	return this, anyone
}
