// Package fair shares a limited number of places among the users of a host, so that none of them can take the places of
// all others.
package fair

import (
	"strconv"
	"strings"

	"gpu-cdi-plugin/internal/fileio"
)

// subordinates is the file with the subordinate user IDs (subuid(5)).
const subordinates = "/etc/subuid"

// maxFile is the size of the largest file of subordinate user IDs that is read, in bytes.
const maxFile = 4 << 20

// Account returns the user ID under which the places of a user count. All subordinate IDs of a user are one account:
// each user of most distributions has 65,536 of them. If the file cannot be read, each user ID counts for itself.
func Account(uid uint32) uint32 {
	f, _, err := fileio.OpenRegular(subordinates)
	if err != nil {
		return uid
	}
	defer f.Close()
	data, _, err := fileio.ReadRegular(f, maxFile)
	if err != nil {
		return uid
	}
	return accountIn(string(data), uid)
}

// accountIn returns the first subordinate ID of the user that has a subordinate ID, and other IDs as they are.
func accountIn(file string, uid uint32) uint32 {
	firsts := map[string]uint32{} // by the name of the user
	for line := range strings.Lines(file) {
		fields := strings.Split(strings.TrimSpace(line), ":")
		if len(fields) != 3 {
			continue
		}
		first, err := strconv.ParseUint(fields[1], 10, 32)
		if err != nil {
			continue
		}
		count, err := strconv.ParseUint(fields[2], 10, 32)
		if err != nil {
			continue
		}
		if _, seen := firsts[fields[0]]; !seen {
			firsts[fields[0]] = uint32(first)
		}
		if n := uint64(uid); n >= first && n-first < count {
			return firsts[fields[0]]
		}
	}
	return uid
}

// GivesWay returns which of the places, given by their accounts in the order of arrival, is taken from its account when
// all are taken and another account wants one. That is the newest of the account that has most, and only if that still
// has no fewer than the other one afterwards. Root gets one of anyone's, and never gives one. It returns -1 for none.
func GivesWay(places []uint32, to uint32) int {
	counts := map[uint32]int{}
	for _, account := range places {
		counts[account]++
	}
	most := counts[to] + 1 // it must have more than that
	if to == 0 {
		most = 0
	}
	newest := -1
	for i, account := range places {
		isSame := newest >= 0 && account == places[newest]
		if n := counts[account]; isSame || n > most && account != 0 {
			newest, most = i, n
		}
	}
	return newest
}
