package pace

// shareSlack keeps a rounding of floating point from making a class eligible.
const shareSlack = 1e-9

// apportion gives out at most room sessions, unit by unit, and returns how many.
//
// It is the quota method of Balinski and Young ("The quota method of apportionment",
// American Mathematical Monthly 82, 1975): of the classes that one more unit leaves
// below their share rounded up, the one with the largest share over what it then has
// is next. From nothing on, every class is always within one unit of its share of the
// total, however the total is reached; classes that were released above their share
// wait until the others have caught up.
func apportion(classes []Class, unit, room int64, out []ClassAdvice) (given int64) {
	has := make([]int64, len(classes))
	var total int64
	for i := range classes {
		has[i] = classes[i].Released
		total += has[i]
	}
	for ; given+unit <= room; given += unit {
		next := -1
		after := float64(total + given + unit)
		for i := range classes {
			share := classes[i].Share
			if float64(has[i]) >= share*after-shareSlack {
				continue
			}
			// The comparison of share over count, without a division.
			if next < 0 || share*float64(has[next]+unit) > classes[next].Share*float64(has[i]+unit) {
				next = i
			}
		}
		if next < 0 {
			break
		}
		has[next] += unit
		out[next].Sessions += unit
		out[next].Groups++
	}
	return given
}
