package launch

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager/arguments"
)

// placeholder matches what expand replaces:
//
//	{cdi}                          the CDI names, separated by commas
//	{uuids}                        the UUIDs of the devices, separated by commas
//	{podman}, {docker}, {nerdctl}  the options of an engine; the only ones that can become several arguments
//	{count}                        the number of devices
//
// All but {count} name the devices, so that nothing else passes them to an engine.
var placeholder = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`\{(cdi|uuids|podman|docker|nerdctl|count)\}`)
})

// used says which placeholders a command has.
type used struct {
	// named means that some name the devices, engine that some do that for an engine: all but {uuids}.
	named, engine bool
}

// expand returns the arguments with the values of placeholders. The first argument is the program and is not changed.
// Values are not searched for placeholders.
func (l lease) expand(args []string) (expanded []string, u used, err error) {
	expanded = append(expanded, args[0])
	for _, arg := range args[1:] {
		if name := strings.Trim(arg, "{}"); arg == "{"+name+"}" && slices.Contains(arguments.Engines(), name) {
			options, err := arguments.For(name, l.RunOptions)
			if err != nil {
				return nil, u, err
			}
			expanded, u = append(expanded, options...), used{named: true, engine: true}
			continue
		}
		text, err := l.replace(arg, &u)
		if err != nil {
			return nil, u, fmt.Errorf("argument %q: %w", wording.Shorten(arg, maxShown), err)
		}
		expanded = append(expanded, text)
	}
	return expanded, u, nil
}

// replace returns one argument with the values of placeholders, and adds which it has. A shell's ${count} and a
// template's {{count}} are no placeholders.
func (l lease) replace(arg string, u *used) (string, error) {
	var b strings.Builder
	end := 0
	for _, at := range placeholder().FindAllStringIndex(arg, -1) {
		if at[0] > 0 && strings.IndexByte("${", arg[at[0]-1]) >= 0 {
			continue
		}
		var value string
		switch found := arg[at[0]:at[1]]; found {
		case "{count}":
			value = strconv.Itoa(len(l.uuids))
		case "{uuids}":
			value, u.named = strings.Join(l.uuids, ","), true
		case "{cdi}":
			if len(l.CDIDevices) == 0 {
				return "", errors.New("the plugin gave no CDI names for {cdi}; use {podman}, {docker} or {nerdctl}")
			}
			value, u.named, u.engine = strings.Join(l.CDIDevices, ","), true, true
		default:
			return "", fmt.Errorf("%s becomes several arguments, so it must be an argument of its own", found)
		}
		b.WriteString(arg[end:at[0]] + value)
		end = at[1]
	}
	b.WriteString(arg[end:])
	return b.String(), nil
}
